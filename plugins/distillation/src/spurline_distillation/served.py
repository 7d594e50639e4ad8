"""Scorer `served_teacher`: score the answers of a group with a model behind an OpenAI-compatible server of vLLM.

In: a finished group. Out: the group with the teacher's logprob of each response token, and its likeliest tokens if
wanted. A group is one request with the token ids of all its turns. The answer must have a logprob for each token that
was sent, under this token's own id, or it is not used. While a server is away, its groups go to others, and wait. A
server is checked before it is first used.
"""

from __future__ import annotations

import asyncio
import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from http.client import HTTPException
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
from spurline_rl.preparation import turns_with_prompts
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.trajectory import Group, Turn

_SAMPLE = "The 3 cats cost $12.50.\n\tdef f(x): return x ** 2  # naive caf\u00e9 \u4f60\u597d \u0645\u0631 \U0001f600"
"""Text whose tokens differ between most tokenizers."""
_TRY_AGAIN = (408, 409, 425, 429)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 5.0
_CHECK_TIMEOUT_S = 30.0
_MALFORMED = (LookupError, ValueError, TypeError, AttributeError)
"""Errors of reading an answer that has another form than the server's interface says."""


class WrongAnswerError(Exception):
    """An answer that is not for the tokens that were sent."""


class ServedTeacher:
    """The scorer `served_teacher`.

    Raises:
        ConfigError: If no server answers, a server's tokenizer has other tokens than the run's, or a server does not
            tokenize or score prompts. `score` raises it for a server that was away at the start.
    """

    def __init__(self, config: ServedTeacherConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._urls = [url.rstrip("/").removesuffix("/v1") for url in config.urls]
        self._tokenizer = tokenizer
        self._model = config.model or self._first_model()
        away: dict[str, Exception] = {}
        for url in self._urls:
            try:
                self._check(url)
            except (OSError, HTTPException) as error:
                away[url] = error
        if len(away) == len({*self._urls}):
            raise _no_answer(away)
        self._unchecked = {*away}
        self._next = count()
        self._session: aiohttp.ClientSession | None = None
        self._places = {url: asyncio.Semaphore(config.max_concurrent) for url in self._urls}

    async def score(self, group: Group, prompt: Draw) -> Group:
        scored = await self._answer(turns_with_prompts([group], self._config.role))
        columns = {name: np.concatenate([each[name] for each in scored]) for name in self._config.columns}
        return replace(group, token_columns={**group.token_columns, **columns})

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _answer(self, turns: Sequence[Turn]) -> list[dict[str, NDArray[Any]]]:
        """Ask one server after the other until one answers. Raises AttemptFailedError after `give_up_after_s`."""
        body = self._request([np.concatenate([turn.prompt_ids, turn.response_ids]).tolist() for turn in turns])
        loop = asyncio.get_running_loop()
        give_up_at: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            url = self._urls[next(self._next) % len(self._urls)]
            try:
                if url in self._unchecked:
                    await asyncio.to_thread(self._check, url)
                    self._unchecked.discard(url)
                async with self._places[url]:
                    choices = await self._post(url, body)
                return [_scores(turn, choice, self._config) for turn, choice in zip(turns, choices, strict=True)]
            except (aiohttp.ClientError, HTTPException, OSError, WrongAnswerError, *_MALFORMED) as error:
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
            if 400 <= response.status < 500 and response.status not in _TRY_AGAIN:
                # The same request would be refused again.
                raise AttemptFailedError(f"The teacher at {url} refused the answers: {(await response.text())[:500]}")
            response.raise_for_status()
            answer: Any = await response.json()
        choices = cast("list[Mapping[str, Any]]", answer.get("choices") or [])
        by_index = {int(choice["index"]): choice for choice in choices}
        if sorted(by_index) != list(range(len(body["prompt"]))):
            raise WrongAnswerError(f"choices {sorted(by_index)} for {len(body['prompt'])} prompts")
        return [by_index[number] for number in range(len(by_index))]

    def _request(self, prompts: list[list[int]]) -> Mapping[str, Any]:
        logprobs = self._config.top_k
        return {"model": self._model, "prompt": prompts, "max_tokens": 1, "temperature": 0, "prompt_logprobs": logprobs}

    def _first_model(self) -> str:
        errors: dict[str, Exception] = {}
        for url in self._urls:
            try:
                return str(self._fetch(f"{url}/v1/models")["data"][0]["id"])
            except (OSError, HTTPException, *_MALFORMED) as error:
                errors[url] = error
        raise _no_answer(errors)

    def _check(self, url: str) -> None:
        """Compare the tokens of a text and of the special tokens with the server's, and ask for logprobs once.

        Raises:
            ConfigError: If the server cannot be used.
            OSError: If the server is away.
        """
        tokenizer = self._tokenizer
        text = _SAMPLE + "".join(map(str, tokenizer.all_special_tokens))
        own = tokenizer.encode(text, add_special_tokens=False)
        step = "tokenize a text (/tokenize)"
        try:
            sent = {"model": self._model, "prompt": text, "add_special_tokens": False}
            theirs = self._fetch(f"{url}/tokenize", sent)["tokens"]
            step = f"give prompt_logprobs: {self._config.top_k} of a prompt (/v1/completions)"
            [choice] = self._fetch(f"{url}/v1/completions", self._request([own[:2]]))["choices"]
            len(choice["prompt_logprobs"])
        except urllib.error.HTTPError as error:
            if error.code >= 500 or error.code in _TRY_AGAIN:
                raise
            raise _unusable(url, step, f"{error} {error.read(500).decode(errors='replace')}") from error
        except _MALFORMED as error:
            raise _unusable(url, step, f"{type(error).__name__}: {error}") from error
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

    def _fetch(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=min(_CHECK_TIMEOUT_S, self._config.request_timeout_s)) as response:
            return json.load(response)


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


def _unusable(url: str, step: str, reason: str) -> ConfigError:
    return ConfigError.at(
        "source.scorers",
        f"has a served_teacher at {url} that does not {step}: {reason}. Serve the teacher with vLLM, and with "
        "--max-logprobs of at least top_k.",
    )


def _no_answer(errors: Mapping[str, Exception]) -> ConfigError:
    reasons = "; ".join(f"{url}: {error}" for url, error in errors.items())
    return ConfigError.at("source.scorers", f"has a served_teacher that does not answer. {reasons}")
