"""Environment and dataset `verifiers`: tasksets, rewards and agents of that library, which plays the model here.

Data flow: taskset -> rows (the data of the tasks) -> a task again -> an episode of the library, whose requests for the
model go through the library's own server to the recording endpoint -> its trace -> Trajectory.

The library runs on an event loop in a thread of its own, so rewards that compute for long do not hold up the run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import cached_property
from importlib.machinery import ModuleSpec
from itertools import islice
from types import ModuleType
from typing import Any, TypeVar, get_args

import xxhash
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import ConfigError, DataError, PluginError, Problem, SpurlineError, listing, suggestion
from spurline.plugins.registry import Registry
from spurline_agents.agents import CANCEL_TIMEOUT_S
from spurline_agents.configs import VerifiersConfig, VerifiersRowsConfig
from spurline_agents.environment import result_of
from spurline_agents.responses import MODEL_NAME
from spurline_agents.server import FORWARDED_KEY, HarnessServer
from spurline_agents.sessions import LiveSession
from spurline_concurrency.calls import end_tasks
from spurline_environments.tool_formats import Turns
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import AttemptFailedError, PolicyHandle, Task
from spurline_rl.scoring import checked_score
from spurline_rl.trajectory import Trajectory

T = TypeVar("T")

CHAT = "spurline_chat"
"""Id of the harness that is the default here: a chat with the taskset's tools, in this process."""


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
    logging.getLogger("aiohttp.server").addFilter(_is_no_lost_connection)
    return verifiers.v1


def _is_no_lost_connection(record: logging.LogRecord) -> bool:
    # The library's server logs a traceback when a client ends its connection.
    return not (record.exc_info and isinstance(record.exc_info[1], ConnectionResetError))


def _taskset_settings(path: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the library's settings of a taskset. A class that a path names gets an id in the library."""
    if ":" not in path:
        return {"id": path, **arguments}
    library, taskset = _library(), load_function(path, "taskset")
    module = sys.modules[taskset.__module__]
    own = (name for name, each in vars(module).items() if getattr(each, "__module__", None) == module.__name__)
    exported = [getattr(module, name, None) for name in getattr(module, "__all__", own)]
    others = [each for each in exported if isinstance(each, type) and issubclass(each, (library.Env, library.Harness))]
    parts = {part.__name__: part for part in (taskset, *others)}
    # An id belongs to a module, and the library takes the only taskset that the module exports.
    name = f"{taskset.__name__.lower()}_{xxhash.xxh3_64_hexdigest(path.encode())}"
    known = ModuleType(f"verifiers.v1.tasksets.{name}")
    vars(known).update(parts, __all__=[*parts], __spec__=ModuleSpec(known.__name__, None))
    sys.modules[known.__name__] = known
    return {"id": name, **arguments}


def _settings(place: str, taskset: str, arguments: Mapping[str, Any], env: Mapping[str, Any]) -> Any:
    """Return the library's settings. Raises ConfigError that names those settings after `place` that it refuses."""
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

    given: dict[str, Any] = {**env, "taskset": _taskset_settings(taskset, arguments)}
    try:
        return loaders.resolve_env_config(given)
    except ValidationError as error:
        of_env = loaders.env_config_type(given["taskset"]["id"], env.get("id", ""))
        problems: list[Problem] = []
        for each in error.errors():
            key, section, path = "env", of_env, [*map(str, each["loc"])]
            if path[0] == "taskset":
                key, section, path = "arguments", loaders.taskset_config_type(given["taskset"]["id"]), path[1:]
            known = _names_in(section, path[:-1])
            message = f"is refused by verifiers: {each['msg']}."
            if each["type"] == "extra_forbidden":
                message = f"is not a setting of verifiers.{suggestion(path[-1], known)} Settings: {listing(known)}."
            problems.append(Problem(".".join([f"{place}{key}", *path]), message))
        raise ConfigError(problems) from error


def _names_in(section: type[BaseModel], path: Sequence[str]) -> Collection[str]:
    """Return the names of the settings in the section to which the path leads."""
    for name in path:
        field = section.model_fields.get(name)
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)
    return section.model_fields


def _built(what: str, make: Callable[[], T]) -> T:
    """Return what the library makes of settings. Raises ConfigError if it, or the code of a taskset, fails."""
    try:
        return make()
    except SpurlineError:
        raise
    except Exception as error:
        raise ConfigError.at(what, f"is refused by verifiers: {_told(error)}") from error


def _told(error: Exception) -> str:
    """Return the message of an error in one line."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return str(error).replace("must already be installed", "must already be installed, or be given as `file.py:Class`")


class VerifiersRows:
    """The tasks of a taskset as rows: the fields of their data, except the library's own fields that are not set."""

    def __init__(self, config: VerifiersRowsConfig, registry: Registry) -> None:
        self.label = config.place
        self._config = config

    @cached_property
    def _rows(self) -> list[dict[str, Any]]:
        library, config = _library(), self._config
        usual = library.TaskData().model_dump(mode="json")

        def row_of(task: Any) -> dict[str, Any]:
            fields = task.data.model_dump(mode="json").items()
            known = {name: value for name, value in fields if name not in usual or value != usual[name]}
            return {**known, **config.constants}

        def load() -> list[dict[str, Any]]:
            settings = _settings(f"the dataset {self.label}: ", config.taskset, config.arguments, {})
            taskset = library.load_taskset(settings.taskset)
            if config.limit is None and not taskset.bounded:
                raise ValueError("it has no end. Set `limit` of the dataset")
            end = None if config.limit is None else config.skip + config.limit
            return [row_of(task) for task in islice(taskset, config.skip, end)]

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
        # Only the config of a task is needed for what it declares.
        task = object.__new__(type(self._env.taskset).task_type())
        task.config = self._env.taskset.config.task
        self.reward_terms = [reward.__name__ for reward in task.hooks("reward")]
        self.notes = (*self._turns.notes, f"rewards of the tasks: {listing(self.reward_terms)}")
        self._server: HarnessServer | None = None
        self._starting: asyncio.Task[HarnessServer] | None = None
        self._serving: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True)

    def _make(self) -> Any:
        """Build the library's environment. An agent without a harness gets ours, which runs in this process."""
        from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils.loaders import harness_config_type  # pyright: ignore[reportMissingImports]

        config = _settings("source.environment.", self._config.taskset, self._config.arguments, self._config.env)
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
        """Stop the library's servers and the endpoint, also while they start."""
        started = [task for task in (self._starting, self._serving) if task is not None]
        server, self._server = self._server, None
        try:
            await end_tasks(started, "verifiers", CANCEL_TIMEOUT_S)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            if server is not None:
                await server.stop()

    async def _started(self) -> HarnessServer:
        """Return the endpoint. Its start goes on if the attempt that began it is cancelled."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> HarnessServer:
        server = HarnessServer(self._config, self._tokenizer, self._turns)
        await server.start()
        self._server = server
        self._thread.start()
        loop, started = asyncio.get_running_loop(), asyncio.Future[None]()

        async def serve() -> None:
            async with self._env.serving():
                loop.call_soon_threadsafe(started.set_result, None)
                await asyncio.Event().wait()

        self._serving = asyncio.create_task(self._in_loop(serve()))
        await asyncio.wait([started, self._serving], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            raise PluginError(f"the servers of verifiers did not start: {self._serving.exception()}")
        return server

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of work on the library's loop. If this is cancelled, cancel the work and wait for it."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda task: loop.call_soon_threadsafe(ended.set))

        self._loop.call_soon_threadsafe(begin)
        try:
            await ended.wait()
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await ended.wait()
            raise
        return tasks[0].result()

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
        if len(traces) != 1:
            raise PluginError(
                f"{live.where}: an episode of {self._config.taskset} has {len(traces)} trained agents. One agent can "
                "be trained. Give the others a model of their own (env.NAME.client)."
            )
        [trace] = traces
        answer, info = live.answer(task.row)
        if not trace.rewards:
            raise AttemptFailedError(f"{live.where}: the taskset {self._config.taskset} has given no reward.")
        values = {name: None if reward is None else reward.value for name, reward in trace.rewards.items()}
        terms = {name: checked_score(name, value, answer) for name, value in values.items()}
        numbers = {name: value for name, value in trace.metrics.items() if value is not None}
        info["metrics"].update({f"verifiers/{name}": value for name, value in numbers.items()})
        return live.policy.finish(terms, info={**info, "ended": trace.stop_condition})
