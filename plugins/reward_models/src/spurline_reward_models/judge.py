"""Reward `judge`: a served language model gives an answer a mark by a rubric.

The rubric, filled in with the answer, is one chat request. The judge must reply with a JSON object that has a `reason`
and a `score`; servers with structured outputs are made to. The same request is asked once: marks are kept in a table.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
import threading
import time
from typing import Any, cast
from weakref import WeakValueDictionary

from spurline.errors import ConfigError, DataError, PluginError, RunFailedError, listing, suggestion
from spurline_reward_models.configs import JudgeConfig
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.reward import Answer

_REFUSALS = (401, 403, 404)
"""Statuses of a server that would refuse every request. With others, another answer may get a mark."""
_SHOWN_CHARACTERS = 200


class Judge:
    """The reward `judge`: the mark as a share of the scale, from 0 to 1.

    Raises:
        PluginError: If the package `openai` is missing.
        ConfigError: If the environment variable with the key is not set.
    """

    def __init__(self, config: JudgeConfig) -> None:
        try:
            import openai
        except ImportError as error:
            raise PluginError(
                "needs the package openai. Install it with `pip install spurline-reward-models[judge]`."
            ) from error
        key = "none" if config.api_key_env is None else os.environ.get(config.api_key_env)
        if not key:
            raise ConfigError.at("rewards", f"has a judge whose key is not set: {config.api_key_env}. Export it.")
        self._config = config
        self._openai = openai
        self._client = openai.OpenAI(
            base_url=config.url, api_key=key, timeout=config.timeout_s, max_retries=config.retries
        )
        self._places = threading.BoundedSemaphore(config.max_concurrent)
        self._lock = threading.Lock()
        self._asking: WeakValueDictionary[bytes, threading.Lock] = WeakValueDictionary()
        """A lock for each request that is under way, so that an equal one waits for its mark."""
        # Several threads use the connection, one at a time.
        self._marks = sqlite3.connect(config.cache or ":memory:", check_same_thread=False, isolation_level=None)
        self._marks.execute("CREATE TABLE IF NOT EXISTS marks (request BLOB PRIMARY KEY, score REAL NOT NULL)")

    def score(self, answer: Answer) -> float:
        """Return the mark, from 0 to 1.

        `answer.metrics` gets `cached` (1 if the mark was known), and for a new request `seconds`, `prompt_tokens` and
        `completion_tokens`.

        Raises:
            AttemptFailedError: If the judge does not reply, or its reply has no mark on the scale.
            DataError: If the rubric names a column that the row lacks.
            RunFailedError: If the server refuses the key or the model.
        """
        request = self._request(answer)
        key = hashlib.blake2b(json.dumps(request, sort_keys=True).encode(), digest_size=16).digest()
        with self._lock:
            asking = self._asking.setdefault(key, threading.Lock())
        with asking:
            with self._lock:
                known = self._marks.execute("SELECT score FROM marks WHERE request = ?", [key]).fetchone()
            answer.metrics["cached"] = float(known is not None)
            if known is not None:
                return float(known[0])
            begin = time.perf_counter()
            with self._places:
                score = self._ask(request, answer)
            answer.metrics["seconds"] = time.perf_counter() - begin
            with self._lock:
                self._marks.execute("INSERT OR REPLACE INTO marks VALUES (?, ?)", [key, score])
            return score

    def close(self) -> None:
        self._client.close()
        self._marks.close()

    def _request(self, answer: Answer) -> dict[str, Any]:
        config, low, high = self._config, *self._config.scale
        said = "\n\n".join(f"{each['role']}: {each.get('content') or ''}" for each in answer.messages)
        values = {
            **answer.row,
            "prompt": answer.prompt,
            "response": answer.response,
            "reference": answer.reference,
            "conversation": said or f"{answer.prompt}{answer.response}",
        }
        try:
            rubric = config.rubric.format_map(values)
        except KeyError as error:
            raise DataError(
                f"the rubric of the judge names {{{error.args[0]}}}, which the row lacks."
                f"{suggestion(str(error.args[0]), values)} There are: {listing(values)}."
            ) from error
        mark = {"type": "number", "minimum": low, "maximum": high}
        schema = {
            "type": "object",
            "properties": {"reason": {"type": "string"}, "score": mark},
            "required": ["reason", "score"],
            "additionalProperties": False,
        }
        wanted = (
            f'Reply with a JSON object {{"reason": "...", "score": NUMBER}}. The score is from {low:g} to {high:g}.'
        )
        return {
            "model": config.model,
            "messages": [{"role": "user", "content": f"{rubric}\n\n{wanted}"}],
            "temperature": 0.0,
            "seed": 0,
            "max_tokens": config.max_new_tokens,
            "response_format": {"type": "json_schema", "json_schema": {"name": "mark", "schema": schema}},
        }

    def _ask(self, request: dict[str, Any], answer: Answer) -> float:
        config, (low, high) = self._config, self._config.scale
        try:
            reply: Any = self._client.chat.completions.create(**request)
        except self._openai.APIStatusError as error:
            if error.status_code in _REFUSALS:
                raise RunFailedError(f"the judge at {config.url} refused a request: {error}") from error
            raise AttemptFailedError(f"the judge at {config.url} failed: {error}") from error
        except self._openai.OpenAIError as error:
            raise AttemptFailedError(
                f"the judge at {config.url} did not reply in {config.retries + 1} requests of {config.timeout_s:g} s: "
                f"{error}"
            ) from error
        if reply.usage is not None:
            answer.metrics["prompt_tokens"] = float(reply.usage.prompt_tokens)
            answer.metrics["completion_tokens"] = float(reply.usage.completion_tokens)
        text = str(reply.choices[0].message.content or "")
        try:
            score = float(cast("dict[str, Any]", json.loads(text))["score"])
        except (ValueError, LookupError, TypeError) as error:
            raise AttemptFailedError(
                f"the judge's reply has no score: {text[:_SHOWN_CHARACTERS]!r} (finish reason "
                f"{reply.choices[0].finish_reason}). Raise max_new_tokens if it was cut off, or serve the judge with "
                "structured outputs."
            ) from error
        if not low <= score <= high:
            raise AttemptFailedError(f"the judge gave {score:g}, which is not on the scale from {low:g} to {high:g}.")
        return (score - low) / (high - low)
