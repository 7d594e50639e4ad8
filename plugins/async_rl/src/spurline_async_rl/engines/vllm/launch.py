"""Start a vLLM engine, watch its processes, and end them. vLLM is imported when an engine starts."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

import psutil

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import BucketLostError, RunFailedError, listing
from spurline_async_rl.engines.commands import UPDATE, Command
from spurline_async_rl.engines.configs import ALONE, CPU_KV_CACHE_GB, VllmEngineConfig
from spurline_async_rl.engines.gpus import VISIBLE
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.vllm.adapters import EngineAdapter, engine_adapter
from spurline_ranks.devices import variables_of_one_machine
from spurline_ranks.logs import begin_log, last_words
from spurline_rl.configs import support_width

WORKER_EXTENSION = "spurline_async_rl.engines.vllm.worker_extension.WorkerExtension"
OWNER = "SPURLINE_VLLM_OWNER"
"""Environment variable with the id of the process that owns the engine. When that process ends, the engine ends too."""
LOST = "lost"
"""Key in the answer of a worker that did not get a bucket. The value is the reason."""
_NO_ADAPTER = "If vLLM has no LoRA support for this model, send merged weights: set source.weight_sync.adapters: false."
_NO_MEMORY = "Lower source.engine.gpu_memory_utilization, or let trainer and engine take turns: placement: colocated."
_MANY_MACHINES = {"distributed_executor_backend", "nnodes"}
"""Arguments of vLLM that let an engine use several machines."""
_ONE_AT_A_TIME = threading.Lock()
"""Engines start one after another, because a start changes `os.environ` and must be able to find its new processes."""
_FRAME = re.compile(r"(\(.*?pid=\d+\) )?([A-Z]+ [-\d: ]+\[[^]]*\] )? ")
"""Matches an indented line of a traceback. vLLM may put a prefix before the line."""
_READ_BYTES, _SHOWN_CHARACTERS = 100_000, 4000


def worker_call(command: Command) -> tuple[Any, ...] | None:
    """Return (name of a method of `WorkerExtension`, *arguments) for an update command, or None for another command."""
    if command.hold != UPDATE:
        return None
    values = command.to_plain()
    return (f"spurline_{command.name}", *(values[name] for name in ("adapter", "bucket") if name in values))


def check_complete(answers: Sequence[Sequence[str] | Mapping[str, str] | None]) -> None:
    """Check the workers' answers to a `worker_call`.

    Raises:
        BucketLostError: If a worker did not get a bucket.
        RunFailedError: If some layers did not get all of their weights in the update.
    """
    for answer in answers:
        if isinstance(answer, Mapping):
            raise BucketLostError(answer[LOST])
    layers = sorted({layer for missing in answers for layer in missing or ()})
    if layers:
        raise RunFailedError(f"No new weights came for {listing(layers[:4])}. All weights must be published together.")


@dataclass(frozen=True)
class EngineSpec:
    """The description with which this process or a Ray actor starts an engine.

    Attributes:
        notes_experts: Whether the engine returns the experts to which it routed each token.
        most_kept: The largest number of tokens that a request asks for with `support_width`.
        gpus: The engine's CUDA_VISIBLE_DEVICES, or None to inherit the variable.
        adapter: The adapter that each publish sends to the engine, or None if a publish sends whole weights.
        peers_elsewhere: Whether the engine may exchange weights with other machines.
        log: The file for the output of the engine's processes, or None to inherit this process's output.
    """

    config: VllmEngineConfig
    model: ModelConfig
    notes_experts: bool = False
    most_kept: int = 0
    gpus: str | None = None
    adapter: EngineAdapter | None = None
    peers_elsewhere: bool = True
    log: Path | None = None


def engine_spec(config: VllmEngineConfig, run: RunConfig) -> EngineSpec:
    """Return the spec of this run's engines. Raises ModelError as `engine_adapter` does."""
    ranks, sampling = run.backend.rank_request(), run.source.facts.sampling
    return EngineSpec(
        config.model_copy(update={"gpu_memory_utilization": config.gpu_share(run)}),
        run.model,
        notes_experts=run.source.facts.replays_experts,
        most_kept=0 if sampling is None else support_width(sampling.top_k),
        adapter=engine_adapter(config, run),
        peers_elsewhere=config.is_elsewhere or (ranks is not None and ranks.launch == "ray"),
    )


def engine_arguments(spec: EngineSpec, *, on_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's AsyncEngineArgs."""
    config, model = spec.config, spec.model
    kv_cache_gb = config.kv_cache_gb or (CPU_KV_CACHE_GB if on_cpu else None)
    arguments: dict[str, Any] = {
        "model": model.path,
        "revision": model.revision,
        "tokenizer": model.tokenizer or model.path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.config_overrides),
        # With random weights, the first publish brings the trainer's weights.
        "load_format": "dummy" if model.init == "random" else "auto",
        "use_tqdm_on_load": False,
        "dtype": ("float32" if on_cpu else "bfloat16") if config.dtype == "auto" else config.dtype,
        # With -1, vLLM chooses the longest context for which the cache is large enough.
        "max_model_len": config.max_model_len or -1,
        "gpu_memory_utilization": config.gpu_memory_utilization or ALONE,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": on_cpu,
        "max_num_seqs": config.max_num_seqs,
        # A probe of the published weights does not wait behind other requests.
        "scheduling_policy": "priority",
        # A prompt is computed only once for all its requests with the same weights.
        "enable_prefix_caching": True,
        "kv_cache_memory_bytes": None if kv_cache_gb is None else round(kv_cache_gb * 2**30),
        # These are the logprobs of the sampled distribution, after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }
    if on_cpu:
        # With chunked prefill, vLLM resets a random generator, which CPUs refuse: "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
    elif config.is_colocated:
        # On CPUs vLLM refuses this setting, and ignores sleep and wake.
        arguments["enable_sleep_mode"] = True
    if spec.most_kept:
        arguments["max_logprobs"] = spec.most_kept + 1
    if spec.notes_experts:
        arguments["enable_return_routed_experts"] = True
    if spec.adapter is not None:
        arguments |= spec.adapter.arguments()
    return arguments | config.engine_args


@contextmanager
def engine_environment(
    config: VllmEngineConfig, gpus: str | None = None, *, peers_elsewhere: bool = True
) -> Iterator[None]:
    """Set the environment for the engine's processes. See `EngineSpec` for `gpus` and `peers_elsewhere`."""
    spare_cores = max(1, ((os.cpu_count() or 2) - 1) // config.engines)
    spreads = bool(_MANY_MACHINES & config.engine_args.keys())
    interfaces = {} if spreads else variables_of_one_machine(peers_elsewhere=peers_elsewhere)
    variables: dict[str, str | None] = {
        OWNER: str(os.getpid()),
        # If vLLM bound its threads to cores, engines and trainer would use the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.cpu_threads or spare_cores),
        # This variable would override kv_cache_gb.
        "VLLM_CPU_KVCACHE_SPACE": None,
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        # Python's resource tracker would warn when it frees the shared memory of a dead engine.
        "PYTHONWARNINGS": ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"))),
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
        # By default, vLLM forks on GPUs, which is unsafe in a process with threads. In Ray's actors it always spawns.
        **({} if config.placement == "ray" else {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),
        **interfaces,
        **({} if gpus is None else {VISIBLE: gpus}),
    }
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class EngineProcesses:
    """The processes with the ids `main`, and all processes that they have started."""

    def __init__(self, main: Sequence[int]):
        self._main = [psutil.Process(pid) for pid in main]
        # Process handles are safer than ids, because the system may reuse an id.
        self._all = [*self._main, *(child for process in self._main for child in process.children(recursive=True))]

    def __str__(self) -> str:
        return f"process {self._main[0].pid}"

    async def wait_ended(self) -> str:
        """Wait until one process ends, because an engine needs all of them. Return a message about it."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        watched: list[int] = []
        try:
            for process in self._all:
                try:
                    descriptor = os.pidfd_open(process.pid)
                except ProcessLookupError:
                    return f"process {process.pid} has ended"
                watched.append(descriptor)
                loop.add_reader(descriptor, ended.set)
            await ended.wait()
            return f"{self} or one of its child processes has ended"
        finally:
            for descriptor in watched:
                loop.remove_reader(descriptor)
                os.close(descriptor)

    def kill(self) -> None:
        for process in self._all:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self._all, timeout=10)


class EngineStart:
    """One attempt to start an engine."""

    def __init__(self, spec: EngineSpec):
        self._spec = spec
        self._given_up = False
        self._others: set[int | None] | None = None

    def run(self) -> Any:
        """Start and return an AsyncLLM. Raises EngineDiedError with vLLM's message if vLLM cannot start."""
        spec = self._spec
        environment = engine_environment(spec.config, spec.gpus, peers_elsewhere=spec.peers_elsewhere)
        with _ONE_AT_A_TIME, environment, _without_ctrl_c(), writing_to(spec.log):
            from vllm import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            arguments = engine_arguments(spec, on_cpu=current_platform.is_cpu())
            self._others = {child.pid for child in _engine_cores()}
            try:
                self._check()
                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
            except EngineDiedError:
                raise
            except Exception as error:
                hint = "" if spec.adapter is None else f" {_NO_ADAPTER}"
                text = f"vLLM does not start: {type(error).__name__}: {error}{hint}{end_of(spec.log)}"
                text += f"\n{_NO_MEMORY}" if "less than desired GPU memory" in text else ""
                raise EngineDiedError(text) from error
            finally:
                self._others = None
        if self._given_up:
            llm.shutdown()
        self._check()
        return llm

    def give_up(self) -> None:
        """Kill the processes of an engine that is still starting."""
        self._given_up = True
        others = self._others
        if others is not None:
            mine = [child.pid for child in _engine_cores() if child.pid is not None and child.pid not in others]
            EngineProcesses(mine).kill()

    def _check(self) -> None:
        if self._given_up:
            raise EngineDiedError("it was closed while it started")


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Block SIGINT and SIGHUP in processes that are started within this context.

    A terminal sends these signals to all processes of a run. Without the block, Ctrl-C would kill the engines before
    the run has saved its state.
    """
    # Starting the resource tracker unblocks the signals, so it is started before they are blocked.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_of(log: Path | None) -> str:
    """Return the end of an engine's log for a message, or "" if there is no log or it is empty.

    Each process of vLLM prints a long traceback, and only the first traceback shows the cause. The lines about frames
    are removed, so that the end of the log still contains the first traceback.
    """
    lines = [] if log is None else last_words(str(log), _READ_BYTES).splitlines()
    words = "\n".join(line for line in lines if not _FRAME.match(line))[-_SHOWN_CHARACTERS:]
    return f"\nThe end of {log}, without the frames of tracebacks:\n{words}" if words else ""


@contextmanager
def writing_to(log: Path | None) -> Iterator[None]:
    """Write the output of processes that this thread spawns within this context, and of their children, to `log`.

    Neither vLLM nor multiprocessing has a setting for this. A spawned process inherits the output of this process, so
    this output is redirected during each spawn. It is redirected only then, because other threads write output too.
    """
    if log is None:
        yield
        return
    spawn, mine = util.spawnv_passfds, threading.get_ident()

    def spawn_into_log(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if threading.get_ident() != mine:
            return spawn(path, arguments, descriptors)
        before = {stream: os.dup(stream) for stream in (1, 2)}
        try:
            for stream in before:
                os.dup2(file, stream)
            return spawn(path, arguments, descriptors)
        finally:
            for stream, copy in before.items():
                os.dup2(copy, stream)
                os.close(copy)

    file = begin_log(str(log))
    util.spawnv_passfds = spawn_into_log
    try:
        yield
    finally:
        util.spawnv_passfds = spawn
        os.close(file)


def _engine_cores() -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name.startswith("EngineCore")]
