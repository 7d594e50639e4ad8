"""AsyncLLM without an engine behind it: what the engine would send is given by whoever asks for it.

All of vLLM between the message and the generator of a request is vLLM's own: its encoding, output processor and output
handler. What would read prompts and compute is not there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import LogprobsLists
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from spurline.config.run_config import ModelConfig
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm.async_engine import AsyncEngine
from spurline_async_rl.engines.vllm.launch import EngineSpec

REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}


class RecordedCore:
    """A stand-in for vLLM's client of the engine process.

    requests: those made, by the names they were given; vLLM's own names are within. aborted: vLLM's own names.
    """

    def __init__(self) -> None:
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.outputs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.resources = SimpleNamespace(output_queue_task=None, engine_dead=False)
        self.requests: dict[str, EngineCoreRequest] = {}
        self.aborted: list[str] = []
        self.is_paused = False
        self._encoder = MsgpackEncoder()

    def encoded(self, outputs: Sequence[EngineCoreOutput]) -> list[Any]:
        """Return the frames of a message with these outputs."""
        return list(self._encoder.encode(EngineCoreOutputs(outputs=list(outputs))))

    def receive(self, frames: Sequence[Any]) -> None:
        """Hand over the outputs, as vLLM's task that reads the socket does."""
        self.outputs_queue.put_nowait(self.decoder.decode(frames))

    async def get_output_async(self) -> Any:
        message = await self.outputs_queue.get()
        if isinstance(message, Exception):
            raise message
        return message

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        assert request.external_req_id is not None
        self.requests[request.external_req_id] = request

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        self.aborted.extend(request_ids)

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.is_paused = True

    async def resume_scheduler_async(self) -> None:
        self.is_paused = False


class _Inputs:
    assign_request_id = staticmethod(InputProcessor.assign_request_id)

    async def process_inputs_async(self, request_id: str, prompt: Any, params: Any, **_: Any) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id, prompt["prompt_token_ids"], None, params.clone(), None, time.time(), None, None, None
        )


class RecordedEngine(AsyncEngine):
    """An engine that has been started."""

    def __init__(self, *, log_stats: bool = False, **settings: Any) -> None:
        super().__init__(EngineSpec(VllmEngineConfig(**settings), ModelConfig(path="recorded")))
        self.core = RecordedCore()
        self.max_model_len, self.vocabulary, self.weights_dtype = 1 << 20, 1 << 17, "float32"
        self.processes: Any = SimpleNamespace(wait_ended=asyncio.Event().wait)
        llm: Any = object.__new__(_Llm)
        llm.engine_core = self.core
        llm.input_processor = _Inputs()
        llm.output_processor = OutputProcessor(None, log_stats=log_stats)
        llm.renderer = SimpleNamespace(
            mm_processor_cache=None, clear_mm_cache_async=_nothing, stat_mm_cache=lambda: None
        )
        llm.model_config = SimpleNamespace(is_encoder_decoder=False)
        llm.logger_manager = llm.output_handler = None
        llm.vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_sharing_fast_prefill=False))
        llm.scheduler_config = SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None)
        llm.log_requests, llm.log_stats, llm._supported_tasks = False, log_stats, ("generate",)
        self._llm = llm
        self._listen()


class _Llm(AsyncLLM):
    def __del__(self) -> None:
        """There is nothing to shut down."""

    async def pause_generation(self, **asked: Any) -> None:
        """Resume. vLLM also sleeps for a while."""
        await self.engine_core.pause_scheduler_async(**asked)

    async def collective_rpc(self, method: str, **_: Any) -> list[Any]:
        return []


async def _nothing() -> None:
    pass


def step_output(
    internal_id: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    reason: str | None = None,
    kept: Sequence[Sequence[int]] = (),
    columns: int = 0,
    **more: Any,
) -> EngineCoreOutput:
    """Return the output of one step of vLLM for one request.

    kept: the tokens that sampling kept for each token, likeliest first. columns: how many of the likeliest are told.
    """
    count = len(token_ids)
    ids, values = np.zeros((count, 1 + columns), np.int32), np.full((count, 1 + columns), -np.inf, np.float32)
    ids[:, 0], values[:, 0] = token_ids, logprobs
    for row, each in enumerate(kept):
        told = [*each][:columns]
        ids[row, 1 : 1 + len(told)], values[row, 1 : 1 + len(told)] = told, -1.0
    found = LogprobsLists(ids, values, np.ones(count, np.int32))
    return EngineCoreOutput(
        internal_id,
        list(token_ids),
        new_logprobs=found if count else None,
        finish_reason=None if reason is None else REASONS[reason],
        **more,
    )
