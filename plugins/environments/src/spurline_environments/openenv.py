"""Environment `openenv`: episodes on a server that speaks OpenEnv's protocol, by the client of that library.

A session is a connection to the server, which has one environment for it. Sessions are kept and reset for the next
attempt. A session that fails is closed, and the next attempt opens a new one.
"""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import PluginError, listing
from spurline.plugins.registry import Registry
from spurline.terminal import tell
from spurline_concurrency.calls import within
from spurline_environments.configs import OpenEnvConfig
from spurline_environments.episodes import InvalidActionError, Step, converted, function_setting, number_of, play
from spurline_environments.tool_formats import Turns
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.trajectory import Trajectory

_RETRY_S = 0.5
"""Seconds between two tries to connect."""
_KINDS: Mapping[str, Callable[[str], Any]] = {"integer": int, "number": float}
"""How the text becomes the value of a field, by the type in the schema. Other fields get the text itself."""


class _NoSessionError(Exception):
    """The server is not there, or has no place for a session."""


class OpenEnvEnvironment:
    """Plays episodes in sessions of a server."""

    def __init__(
        self, config: OpenEnvConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        try:
            from openenv.core import GenericEnvClient  # pyright: ignore[reportMissingImports]
        except ModuleNotFoundError as error:
            raise PluginError(
                f"environment: openenv needs a package that is not installed ({error.name}). Install it with pip "
                'install "spurline-environments[openenv]".'
            ) from error
        self._client = GenericEnvClient
        self.config = config
        self._tokenizer = tokenizer
        self._turns = Turns(config.tool_format, registry, tokenizer, has_tools=False)
        self.to_action = function_setting(config.action, "action")
        self.to_text = function_setting(config.observation, "observation") or self._default_text
        self.was_reached = False
        self.down_since = math.inf
        """Time of the event loop since which all tries to connect have failed; infinity after a success."""
        self._places = asyncio.Semaphore(config.sessions)
        self._idle: list[Any] = []

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        async with self._session() as client:
            return await play(_Episode(client, self), self.config, self._turns, task, policy, self._tokenizer)

    async def close(self) -> None:
        """Close the sessions that are kept."""
        idle, self._idle = self._idle, []
        for client in idle:
            await client.close()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        async with self._places:
            client = self._idle.pop() if self._idle else None
            if client is None:
                limit = self.config.step_timeout_s
                client = self._client(self.config.url, connect_timeout_s=limit, message_timeout_s=limit)
            try:
                yield client
            except BaseException:
                # Its environment may be in the middle of an episode, or its connection may be lost.
                await client.close()
                raise
            self._idle.append(client)

    async def default_action(self) -> Callable[[str], Any]:
        """Return a function that makes an action of a text: of the named field, of JSON, or of the only field."""
        url, field = self.config.url, self.config.action
        http = url.replace("ws", "http", 1) if url.startswith("ws") else url

        def read_schema() -> dict[str, Any]:
            with urllib.request.urlopen(f"{http.rstrip('/')}/schema", timeout=self.config.step_timeout_s) as answer:
                return json.load(answer)["action"]

        schema = await within(self.config.step_timeout_s, f"{http}/schema", read_schema)
        fields: dict[str, Any] = schema.get("properties", {})
        required = schema.get("required", [])
        if field is not None and field not in fields:
            raise PluginError(f"environment.action is '{field}', but the actions of {url} have {listing(fields)}.")
        only = field or (required[0] if len(required) == 1 else None)

        def to_action(text: str) -> dict[str, Any]:
            if field is None:
                try:
                    found = json.loads(text)
                except (ValueError, RecursionError):
                    found = None
                if isinstance(found, dict):
                    return found
            if only is None:
                raise InvalidActionError(f"write a JSON object with {listing(required or fields)}.")
            return {only: _KINDS.get(fields[only].get("type", ""), str)(text)}

        return to_action

    def _default_text(self, observation: Any) -> str:
        """Return the named field, the only text of the observation, or the whole observation as JSON."""
        field = self.config.observation
        if field is not None:
            if field not in observation:
                raise PluginError(
                    f"environment.observation is '{field}', but an observation of {self.config.url} has "
                    f"{listing(observation)}."
                )
            return str(observation[field])
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)


class _Episode:
    """An episode in one session."""

    def __init__(self, client: Any, environment: OpenEnvEnvironment) -> None:
        self._client = client
        self._environment = environment
        self._config = environment.config
        self._connection: Any = None

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        """Begin an episode. A server that starts again, or has no place, is awaited for `connect_timeout_s`."""
        # Attempts share the wait for a server that is gone.
        environment, limit = self._environment, self._config.connect_timeout_s
        begin = asyncio.get_running_loop().time()
        while True:
            try:
                step = await self._call(lambda: self._client.reset(**{**row, "seed": seed}))
                environment.was_reached, environment.down_since = True, math.inf
                self._connection = self._client._ws
                if self._environment.to_action is None:
                    self._environment.to_action = await self._environment.default_action()
                return step
            except _NoSessionError as error:
                now = asyncio.get_running_loop().time()
                if not environment.was_reached and environment.down_since == math.inf:
                    tell(f"No session with {self._config.url} yet; trying for {limit:g} s. Does the server run?")
                environment.down_since = min(environment.down_since, now)
                if now > min(begin, environment.down_since) + limit:
                    raise (AttemptFailedError if environment.was_reached else PluginError)(
                        f"no session with {self._config.url} (environment.url) within {limit:g} s: {error}. Check that "
                        f"the server runs and allows {self._config.sessions} sessions at a time (environment.sessions; "
                        "the server's max_concurrent_envs)."
                    ) from error
            await self._client.close()
            await asyncio.sleep(_RETRY_S)

    async def step(self, text: str) -> Step:
        assert self._environment.to_action is not None, "an episode begins with its reset"
        action = await converted(within(self._config.step_timeout_s, "`action`", self._environment.to_action, text))
        try:
            step = await self._call(lambda: self._client.step(action))
        except _NoSessionError as error:
            raise AttemptFailedError(str(error)) from error
        # The client connects again by itself. The new session's environment knows nothing of this episode.
        if self._client._ws is not self._connection:
            raise AttemptFailedError(f"the session with {self._config.url} was lost in the middle of an episode.")
        return step

    async def _call(self, call: Callable[[], Any]) -> Step:
        from websockets.exceptions import ConnectionClosed

        url = self._config.url
        try:
            result = await call()
        except TimeoutError as error:
            limit = f"{self._config.step_timeout_s:g} s (environment.step_timeout_s)"
            raise AttemptFailedError(f"{url} did not answer within {limit}.") from error
        except (ConnectionClosed, OSError) as error:
            raise _NoSessionError(f"{url} closed the connection: {error}") from error
        except RuntimeError as error:
            # The client has no other class for what the server answers.
            kind = InvalidActionError if "(code: VALIDATION_ERROR)" in str(error) else AttemptFailedError
            kind = _NoSessionError if "(code: CAPACITY_REACHED)" in str(error) else kind
            raise kind(f"{url}: {error}") from error
        reward = number_of(0.0 if result.reward is None else result.reward, url)
        text = await within(self._config.step_timeout_s, "`observation`", self._environment.to_text, result.observation)
        return Step(str(text), reward, "done" if result.done else "")
