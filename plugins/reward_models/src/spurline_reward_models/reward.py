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


class ModelReward:
    """The reward `model`. With a `role`, scores are 0 until the backend's model gives them."""

    def __init__(self, config: ModelRewardConfig) -> None:
        self._config = config

    def score(self, answer: Answer) -> float:
        return self.score_many([answer])[0]

    def score_many(self, answers: Sequence[Answer]) -> list[float]:
        """Return the scores, in order. Raises AttemptFailedError if the server gives none after all retries."""
        config = self._config
        if config.url is None:
            return [0.0] * len(answers)
        texts = [f"{answer.prompt}{answer.response}{config.suffix}" for answer in answers]
        return [
            score
            for first in range(0, len(texts), config.batch_size)
            for score in self._request(texts[first : first + config.batch_size])
        ]

    def _request(self, texts: Sequence[str]) -> list[float]:
        config = self._config
        url = f"{str(config.url).rstrip('/')}/{config.endpoint}"
        content: dict[str, Any] = {"model": config.model, "input": list(texts)}
        # A server would otherwise put a second BOS before a prompt that a chat template rendered.
        content["add_special_tokens"] = config.special_tokens
        if config.endpoint == "pooling":
            # Older servers call `use_activation` `activation`. Both ignore what they do not know.
            content |= {"task": "classify", "use_activation": False, "activation": False}
        for attempt in range(config.retries + 1):
            try:
                return _scores_in(_post(url, content, config.timeout_s), len(texts))
            except urllib.error.HTTPError as error:
                reason = f"{error} {error.read(500).decode(errors='replace')}"
                if error.code in (400, 401, 403, 404, 422):
                    raise RunFailedError(f"{url} refused to score: {reason}. Is the model served?") from error
            except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
                reason = f"{type(error).__name__}: {error}"
            if attempt < config.retries:
                time.sleep(2**attempt)
        raise AttemptFailedError(f"{url} gave no scores in {config.retries + 1} requests. The last: {reason}")


def _post(url: str, content: Any, timeout_s: float) -> Any:
    request = urllib.request.Request(url, json.dumps(content).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def _scores_in(answer: Any, count: int) -> list[float]:
    """Return the numbers of an answer of `/pooling` or `/classify`. Raises ValueError for any other answer."""
    items = sorted(answer["data"], key=lambda item: int(item["index"]))
    if [int(item["index"]) for item in items] != list(range(count)):
        raise ValueError(f"{len(items)} answers for {count} texts")
    found: list[float] = []
    for item in items:
        value = item["probs"] if "probs" in item else item["data"]
        while isinstance(value, list):
            # The score of the last token, for servers that return all.
            value = value[-1]
        if not math.isfinite(float(value)):
            raise ValueError(f"a score is {value}")
        found.append(float(value))
    return found
