"""Environment and dataset `verifiers`: tasksets, rewards and agents of that library, which plays the model here.

Data flow: taskset -> rows (the data of the tasks) -> a task again -> an episode of the library, whose requests for the
model go through the library's own server to the recording endpoint -> its trace -> Trajectory.

The library runs on an event loop in a thread of its own, so rewards that compute for long do not hold up the run.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from functools import cached_property
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar

import xxhash
from pydantic import ValidationError
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import ConfigError, DataError, PluginError
from spurline.plugins.registry import Registry
from spurline_agents.configs import VerifiersConfig, VerifiersRowsConfig
from spurline_agents.environment import result_of
from spurline_agents.responses import MODEL_NAME
from spurline_agents.server import FORWARDED_KEY, HarnessServer
from spurline_agents.sessions import LiveSession
from spurline_environments.tool_formats import Turns
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.protocols.reward import Answer
from spurline_rl.scoring import checked_score
from spurline_rl.trajectory import Trajectory

T = TypeVar("T")

CHAT = "spurline_chat"
"""Id of the harness that is the default here: a chat with the taskset's tools, in this process."""
_STOP_TIMEOUT_S = 30.0


def _library() -> ModuleType:
    """Import the library, and register our harness in it."""
    try:
        import verifiers.v1  # pyright: ignore[reportMissingImports]

        from spurline_agents import verifiers_chat
    except ModuleNotFoundError as error:
        raise PluginError(
            f"verifiers needs a package that is not installed ({error.name}). Install it with pip install "
            '"spurline-agents[verifiers]".'
        ) from error
    sys.modules[f"verifiers.v1.harnesses.{CHAT}"] = verifiers_chat
    return verifiers.v1


def _taskset_settings(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the library's settings of a taskset. A class that a path names gets an id in the library."""
    if ":" not in path:
        return {"id": path, **arguments}
    module = sys.modules[load_function(path, "taskset").__module__]
    name = "spurline_" + "".join(letter if letter.isalnum() else "_" for letter in module.__name__.lower())
    if not hasattr(module, "__all__"):
        vars(module)["__all__"] = [path.rpartition(":")[2]]
    sys.modules[f"verifiers.v1.tasksets.{name}"] = module
    return {"id": name, **arguments}


def _built(what: str, make: Callable[[], T]) -> T:
    """Return what the library makes of settings. Raises ConfigError if it refuses them."""
    try:
        return make()
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        raise ConfigError.at(what, f"is refused by verifiers: {_told(error)}") from error


def _told(error: Exception) -> str:
    """Return the message of an error in one line."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return str(error)


class VerifiersRows:
    """The tasks of a taskset as rows: the fields of their data that differ from the defaults."""

    def __init__(self, config: VerifiersRowsConfig, registry: Registry) -> None:
        self.label = config.place
        self._config = config

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        library, config = _library(), self._config
        from verifiers.v1.utils.loaders import resolve_env_config  # pyright: ignore[reportMissingImports]

        def load() -> list[dict[str, Any]]:
            settings = {"taskset": _taskset_settings(config.taskset, config.arguments)}
            taskset = library.load_taskset(resolve_env_config(settings).taskset)
            if config.limit is None and not taskset.bounded:
                raise ValueError("it has no end. Set `limit` of the dataset")
            end = None if config.limit is None else config.skip + config.limit
            tasks = islice(taskset, config.skip, end)
            return [task.data.model_dump(mode="json", exclude_defaults=True) for task in tasks]

        return _built(f"the taskset {config.taskset}", load)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        return self._rows[row]

    def location(self, row: int) -> str:
        return f"{self.label} task {self._rows[row]['idx']}"

    def fingerprint(self) -> str:
        return xxhash.xxh3_128_hexdigest(json.dumps(self._rows, sort_keys=True).encode())


class VerifiersEnvironment:
    """Plays episodes of a taskset. The first attempt starts the endpoint and the library's servers.

    The terms are the library's rewards, multiplied by its weights. Its metrics are logged as `verifiers/NAME`.
    """

    def __init__(
        self, config: VerifiersConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._library = _library()
        self._env = _built(f"the taskset {config.taskset}", self._make)
        self._turns = Turns(config.tool_format, registry, tokenizer)
        self.notes = self._turns.notes
        self._starting = asyncio.Lock()
        self._server: HarnessServer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True)
        self._stopping = asyncio.Event()
        self._serving: Any = None

    def _make(self) -> Any:
        """Build the library's environment. An agent without a harness gets ours, which runs in this process."""
        from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils.loaders import harness_config_type, resolve_env_config  # pyright: ignore[reportMissingImports]

        settings = {**self._config.env, "taskset": _taskset_settings(self._config.taskset, self._config.arguments)}
        config = resolve_env_config(settings)
        usual = self._library.AgentConfig().runtime
        changed: dict[str, Any] = {}
        for name, agent in agent_config_fields(config).items():
            updates: dict[str, Any] = {}
            if agent.harness is None and config.agent_harnesses()[name].id == "bash":
                updates["harness"] = harness_config_type(CHAT)(id=CHAT)
                if agent.runtime == usual:
                    # This runtime gives the harness a folder. Ours runs no code of the model in it.
                    updates["runtime"] = self._library.SubprocessConfig()
            changed[name] = agent.model_copy(update=updates)
        return self._library.load_environment(config.model_copy(update=changed))

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        server = await self._started()
        where = f"{task.location} (prompt {task.uid}, sample {task.sample})"
        played = self._task(task)
        live = server.open(policy, where)
        client = self._library.EvalClientConfig(
            base_url=server.base_url,
            api_key_var="SPURLINE_HAS_NO_KEY",
            headers={FORWARDED_KEY: server.forwarding_key},
            # The attempt has its own time limit, and many attempts may connect at once.
            timeout={"connect": None},
        )
        context = self._library.ModelContext(model=MODEL_NAME, client=client)

        def on_trace(trace: Any) -> None:
            # The library sends the trace's id with each request.
            if trace.agent.trainable:
                server.forward(live, trace.id)

        try:
            episode = await result_of(self._in_loop(self._env.run_episode(played, context, on_trace=on_trace)), live)
        finally:
            await server.end(live)
        return self._trajectory(task, live, episode)

    async def close(self) -> None:
        """Stop the library's servers and the endpoint."""
        server, self._server = self._server, None
        if server is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        await asyncio.wait([asyncio.wrap_future(self._serving)], timeout=_STOP_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await server.stop()

    async def _started(self) -> HarnessServer:
        async with self._starting:
            if self._server is None:
                server = HarnessServer(self._config, self._tokenizer, self._turns)
                await server.start()
                self._thread.start()
                started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                loop = asyncio.get_running_loop()

                async def serve() -> None:
                    async with self._env.serving():
                        loop.call_soon_threadsafe(started.set_result, None)
                        await self._stopping.wait()

                self._serving = asyncio.run_coroutine_threadsafe(serve(), self._loop)
                serving = asyncio.wrap_future(self._serving)
                await asyncio.wait([started, serving], return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    raise PluginError(f"the servers of verifiers did not start: {serving.exception()}")
                self._server = server
        return self._server

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _task(self, task: Task) -> Any:
        """Make the library's task of a row. Raises DataError if the row does not have its fields."""
        kind = type(self._env.taskset).task_type()
        fields = {name: value for name, value in task.row.items() if value is not None}
        try:
            return kind(kind.data_type().model_validate(fields), self._env.taskset.config.task)
        except ValueError as error:
            raise DataError(f"{task.location}: the row is no task of {self._config.taskset}: {_told(error)}") from error

    def _trajectory(self, task: Task, live: LiveSession, episode: Any) -> Trajectory:
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            reasons = "; ".join(f"{error.type}: {error.message}" for error in errors)
            raise AttemptFailedError(f"{live.where}: verifiers: {reasons or 'the episode has failed'}")
        traces = [trace for trace in episode.traces if trace.agent.trainable]
        turns = live.policy.turns
        if len(traces) != 1 or not turns:
            raise PluginError(
                f"{live.where}: an episode of {self._config.taskset} has {len(traces)} trained agents and {len(turns)} "
                "turns. One agent can be trained. Give the others a model of their own (env.NAME.client)."
            )
        [trace] = traces
        prompt = str(self._tokenizer.decode(turns[0].prompt_ids.tolist(), skip_special_tokens=False))
        response = str(self._tokenizer.decode(turns[-1].response_ids.tolist(), skip_special_tokens=True))
        messages = list(live.last_chat.messages) if live.last_chat is not None else []
        answer = Answer(prompt, response, None, task.row, messages)
        if not trace.rewards:
            raise AttemptFailedError(f"{live.where}: the taskset {self._config.taskset} has given no reward.")
        values = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
        terms = {name: checked_score(name, value, answer) for name, value in values.items()}
        info = {
            "prompt": prompt,
            "response": response,
            "messages": messages,
            "turns": len(turns),
            "conversations": live.num_conversations,
            "ended": trace.stop_condition,
            "metrics": {
                **live.counts(),
                **{f"verifiers/{name}": value for name, value in trace.metrics.items() if value is not None},
            },
        }
        return live.policy.finish(terms, info=info)
