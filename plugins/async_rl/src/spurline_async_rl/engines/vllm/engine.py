"""Rollout engine `vllm`: a pool of vLLM engines on this machine, in Ray actors, or behind URLs.

Place on the way: config and run -> members -> `EnginePool`, which does the rest. vLLM is imported when one starts.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import RunConfig
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.gpus import own_gpus
from spurline_async_rl.engines.member import EngineMember
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
from spurline_async_rl.engines.vllm.launch import engine_spec, require, require_vllm
from spurline_async_rl.engines.vllm.member import VllmMember
from spurline_async_rl.engines.vllm.server import ServerApi, ServerMember


class VllmEngine(EnginePool):
    """The members are made by the config's `mode` and `placement`."""

    def __init__(self, config: VllmEngineConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase):
        """Raises ConfigError when vLLM, or Ray where engines are its actors, is not installed."""
        self._vllm_config = config
        self._run = run
        self._spec = engine_spec(config, run)
        self._model_tokenizer = tokenizer
        self.num_workers = config.engines * config.tensor_parallel_size
        self._cluster = None
        if config.mode == "server":
            config = config.model_copy(update={"engines": len(config.urls)})
            transports = ("disk",)
        else:
            require_vllm()
            # The best one first; a group of ranks only if they are started for it.
            nccl = ("nccl",) if self._spec.transport == "nccl" else ()
            transports = (*nccl, "shared_memory", "disk", "cuda_ipc")
            if config.placement == "ray":
                require("ray", "has placement: ray", "pip install 'spurline-async-rl[ray]', or set placement: local.")
                from spurline_async_rl.engines.vllm.ray import EngineCluster

                self._cluster = EngineCluster(config, run.backend.rank_request())
        super().__init__(config, self._make, transports=transports, tokenizer=tokenizer)

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
        spec = replace(self._spec, rank_offset=number * each)
        if self._cluster is None:
            engine = AsyncEngine(replace(spec, gpus=own_gpus(self._run, number, config.engines, each)))
        else:
            engine = self._cluster.engine(spec)
        return VllmMember(f"engine {number}", engine, self._model_tokenizer)
