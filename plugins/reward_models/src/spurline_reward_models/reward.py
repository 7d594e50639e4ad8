"""Reward `model`: the score that a reward model gives to a prompt with its response.

A frozen model of the backend (`role`) scores all attempts of a step when their batch is made, since only then the
backend may be used; see `RewardConfig.scored_by`. A served model (`url`) scores the texts of finished attempts, several
in one request.
"""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from spurline.errors import RunFailedError
from spurline_reward_models.configs import ModelRewardConfig
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer

_START = "Start vLLM with --runner pooling, --served-model-name `model` and a --max-model-len for the longest text."
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0


class ModelReward:
    """The reward `model`. With a `role`, scores are 0 until the backend's model gives them."""

    def __init__(self, config: ModelRewardConfig) -> None:
        self._config = config
        # Addresses for chat clients end with /v1, which scores have not.
        self._url = f"{(config.url or '').rstrip('/').removesuffix('/v1')}/{config.endpoint}"
        self._has_scored = False

    def score(self, answer: Answer) -> float:
        return self.score_many([answer])[0]

    def score_many(self, answers: Sequence[Answer]) -> list[float]:
        """Return the scores, in order. Raises AttemptFailedError after `give_up_after_s`, RunFailedError if refused."""
        config = self._config
        if config.url is None:
            return [0.0] * len(answers)
        texts = [f"{answer.prompt}{answer.response}{config.suffix}" for answer in answers]
        return [
            score
            for first in range(0, len(texts), config.batch_size)
            for score in self._scores(texts[first : first + config.batch_size])
        ]

    def _scores(self, texts: Sequence[str]) -> list[float]:
        """Ask until the server gives scores, as it does when it has been started again."""
        give_up_at = time.monotonic() + self._config.give_up_after_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                scores = self._ask(texts)
                self._has_scored = True
                return scores
            except urllib.error.HTTPError as error:
                said = f"{error} {error.read(500).decode(errors='replace')}"
                is_refused = error.code in (400, 401, 403, 404, 422)
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                said, is_refused = f"{type(error).__name__}: {error}", False
            if is_refused or not self._has_scored:
                raise RunFailedError(f"{self._url} gives no score: {said}. {_START}")
            if time.monotonic() + pause_s > give_up_at:
                waited = f"{self._config.give_up_after_s:g} s (give_up_after_s)"
                raise AttemptFailedError(f"{self._url} gave no scores for {waited}. The last failure: {said}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, texts: Sequence[str]) -> list[float]:
        config = self._config
        # A server would otherwise put a second BOS before a prompt that a chat template rendered.
        content = {"model": config.model, "input": texts, "add_special_tokens": config.special_tokens}
        if config.endpoint == "pooling":
            # Older servers call `use_activation` `activation`. Both ignore what they do not know.
            content |= {"task": "classify", "use_activation": False, "activation": False}
        request = urllib.request.Request(self._url, json.dumps(content).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=config.request_timeout_s) as response:
            return _scores_in(json.load(response), len(texts))


def _scores_in(answer: Any, count: int) -> list[float]:
    """Return the numbers of an answer of `/pooling` or `/classify`. Raises ValueError for any other answer."""
    items = sorted(answer["data"], key=lambda item: int(item["index"]))
    if [int(item["index"]) for item in items] != list(range(count)):
        raise ValueError(f"{len(items)} answers for {count} texts")
    found: list[float] = []
    for item in items:
        value = item["probs"] if "probs" in item else item["data"]
        if isinstance(value[-1], list):
            # Some servers return a list for each token. The score is that of the last one.
            value = value[-1]
        if len(value) != 1 or not math.isfinite(float(value[0])):
            raise ValueError(f"the score of a text is {value[:5]} instead of one finite number")
        found.append(float(value[0]))
    return found
