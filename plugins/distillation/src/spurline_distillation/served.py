"""Scorer `served_teacher`: score the answers of a group with a model behind an OpenAI-compatible server of vLLM.

In: a finished group. Out: the group with the teacher's logprob of each response token, and its likeliest tokens if
wanted. A group is one request with the token ids of all its turns. The answer must have a logprob for each token that
was sent, under this token's own id, or it is not used. While a server is away, its groups go to others, and wait.
"""

from __future__ import annotations

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

import aiohttp
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline_distillation.configs import TOP_IDS, TOP_LOGPROBS, ServedTeacherConfig
from spurline_rl.draws import Draw
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.trajectory import Group, Turn, turns_of, with_fields

_SAMPLE = "The 3 cats cost $12.50.\n\tdef f(x): return x ** 2  # naive caf\u00e9 \u4f60\u597d \u0645\u0631 \U0001f600"
"""Text whose tokens differ between most tokenizers."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_CHECK_TIMEOUT_S = 10.0


class WrongAnswerError(Exception):
    """An answer that is not for the tokens that were sent."""


class ServedTeacher:
    """The scorer `served_teacher`.

    Raises:
        ConfigError: If no server answers, or a server's tokenizer has other tokens than the run's.
    """

    def __init__(self, config: ServedTeacherConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in config.urls]
        self._model = config.model or self._first_model()
        for url in self._urls:
            self._check_tokenizer(url, tokenizer)
        self._next = count()
        self._session: aiohttp.ClientSession | None = None
        self._places = {url: asyncio.Semaphore(config.max_concurrent) for url in self._urls}

    async def score(self, group: Group, prompt: Draw) -> Group:
        turns = turns_of([group])
        if (own := group.prompts.get(self._config.role)) is not None:
            turns = [with_fields(turn, prompt_ids=own) for turn in turns]
        scored = await self._answer(turns, prompt)
        columns = {name: np.concatenate([each[name] for each in scored]) for name in self._config.columns}
        return replace(group, token_columns={**group.token_columns, **columns})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _answer(self, turns: Sequence[Turn], prompt: Draw) -> list[dict[str, NDArray[Any]]]:
        """Ask one server after the other until one answers. Raises AttemptFailedError after `give_up_after_s`."""
        body = {
            "model": self._model,
            "prompt": [np.concatenate([turn.prompt_ids, turn.response_ids]).tolist() for turn in turns],
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": self._config.top_k,
        }
        loop = asyncio.get_running_loop()
        give_up_at: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            url = self._urls[next(self._next) % len(self._urls)]
            try:
                async with self._places[url]:
                    choices = await self._post(url, body)
                return [_scores(turn, choice, self._config) for turn, choice in zip(turns, choices, strict=True)]
            except (aiohttp.ClientError, TimeoutError, OSError, WrongAnswerError) as error:
                # The time in which a group waited for its turn does not count.
                give_up_at = give_up_at or loop.time() + self._config.give_up_after_s
                if loop.time() + pause_s > give_up_at:
                    raise AttemptFailedError(
                        f"The teacher at {url} did not score the answers within source.scorers: give_up_after_s "
                        f"{self._config.give_up_after_s:g}: {type(error).__name__}: {error}"
                    ) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _post(self, url: str, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return one choice for each prompt of the request, in order."""
        if self._session is None:
            # The limit of connections is that of `max_concurrent`.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        limit = aiohttp.ClientTimeout(total=self._config.request_timeout_s)
        async with self._session.post(f"{url}/v1/completions", json=body, timeout=limit) as response:
            if 400 <= response.status < 500 and response.status not in (408, 409, 425, 429):
                # The same request would be refused again.
                raise AttemptFailedError(f"The teacher at {url} refused the answers: {(await response.text())[:500]}")
            response.raise_for_status()
            answer: Any = await response.json()
        choices = cast("list[Mapping[str, Any]]", answer.get("choices") or [])
        by_index = {int(choice["index"]): choice for choice in choices}
        if sorted(by_index) != list(range(len(body["prompt"]))):
            raise WrongAnswerError(f"choices {sorted(by_index)} for {len(body['prompt'])} prompts")
        return [by_index[number] for number in range(len(by_index))]

    def _first_model(self) -> str:
        errors: list[str] = []
        for url in self._urls:
            try:
                return str(_fetch(f"{url}/v1/models")["data"][0]["id"])
            except (OSError, LookupError, ValueError) as error:
                errors.append(f"{url}: {error}")
        raise ConfigError.at("source.scorers", f"has a served_teacher that does not answer. {'; '.join(errors)}")

    def _check_tokenizer(self, url: str, tokenizer: PreTrainedTokenizerBase) -> None:
        """Compare the tokens of a text and of the special tokens with the server's, if it tokenizes and is there."""
        text = _SAMPLE + "".join(map(str, tokenizer.all_special_tokens))
        own = tokenizer.encode(text, add_special_tokens=False)
        try:
            sent = {"model": self._model, "prompt": text, "add_special_tokens": False}
            theirs = _fetch(f"{url}/tokenize", sent)["tokens"]
        except (OSError, LookupError, ValueError):
            # Not every server offers this, and one of several may be away. Each answer is checked, too.
            return
        if theirs != own:
            at = next(
                (i for i, pair in enumerate(zip(own, theirs, strict=False)) if pair[0] != pair[1]),
                min(len(own), len(theirs)),
            )
            raise ConfigError.at(
                "source.scorers",
                f"has a served_teacher at {url} whose tokenizer differs from the run's: of one text, token {at} is "
                f"{own[at : at + 1]} here ({tokenizer.decode(own[at : at + 1])!r}) and {theirs[at : at + 1]} there. "
                "Choose a teacher with the same tokenizer.",
            )


def _scores(turn: Turn, choice: Mapping[str, Any], config: ServedTeacherConfig) -> dict[str, NDArray[Any]]:
    """Return the columns of a turn's response tokens. Raises WrongAnswerError if the answer is for other tokens."""
    entries = choice.get("prompt_logprobs")
    start, ids = len(turn.prompt_ids), turn.response_ids.tolist()
    if not isinstance(entries, list) or len(cast("list[Any]", entries)) != start + len(ids):
        raise WrongAnswerError(f"prompt_logprobs are not for the {start + len(ids)} tokens that were sent")
    own: list[float] = []
    likeliest: list[list[tuple[int, float]]] = []
    for token, entry in zip(ids, cast("list[dict[str, Any]]", entries)[start:], strict=True):
        found = {int(name): float(value["logprob"]) for name, value in entry.items()}
        if not math.isfinite(found.get(token, math.nan)):
            raise WrongAnswerError(f"there is no logprob of token {token} where it was sent")
        own.append(found[token])
        if config.top_k:
            top = sorted(found.items(), key=lambda pair: -pair[1])[: config.top_k]
            if len(top) < config.top_k:
                raise WrongAnswerError(f"there are {len(top)} likeliest tokens instead of {config.top_k}")
            likeliest.append(top)
    columns: dict[str, NDArray[Any]] = {f"{config.role}_logprobs": np.array(own, np.float32)}
    if config.top_k:
        pairs = np.array(likeliest, np.float64).reshape(len(ids), config.top_k, 2)
        columns |= {TOP_IDS: pairs[..., 0].astype(np.int32), TOP_LOGPROBS: pairs[..., 1].astype(np.float32)}
    return columns


def _fetch(url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_CHECK_TIMEOUT_S) as response:
        return json.load(response)
