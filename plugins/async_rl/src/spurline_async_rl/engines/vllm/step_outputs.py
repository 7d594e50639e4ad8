"""Decode the messages of vLLM's engine into arrays, because AsyncLLM would make several Python objects per token.

`StepDecoder` decodes the message of each step. `TokenStreams` keeps the tokens of each request until
`AsyncEngine.generate` takes them. AsyncLLM gets only the outputs that wake the reader of a request: its first token,
each full chunk, and its end. This module is imported after an engine has started, because it imports vLLM.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
from msgspec import msgpack
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from spurline_async_rl.engines.response import Delta
from spurline_rl.engines.in_process.response import support_row
from spurline_rl.trajectory import FinishReason


class SampledLogprobs(msgspec.Struct, array_like=True, gc=False):
    """vLLM's `LogprobsLists` as encoded in a message.

    `values` is (dtype, shape [tokens, 1 + K], data), and `token_ids` is the same, still encoded. The data is either
    bytes or the number of the frame with the bytes. The first column is the sampled token. Then come the K likeliest
    tokens, and K is the largest number that a request in the step asks for.
    """

    token_ids: msgspec.Raw
    values: tuple[str, tuple[int, int], msgpack.Ext | int]
    ranks: msgspec.Raw = msgspec.Raw()
    bounds: msgspec.Raw = msgspec.Raw()
    frames: Sequence[Any] = ()

    def table(self, encoded: Any, dtype: str) -> NDArray[Any]:
        """Return encoded values as an array [tokens, 1 + K]."""
        found, shape, data = encoded
        assert found == dtype, f"{found}, not {dtype}"
        return np.frombuffer(self.frames[data] if isinstance(data, int) else data.data, dtype).reshape(shape)


class RequestOutput(EngineCoreOutput, array_like=True, omit_defaults=True, gc=False):
    """The outputs of a step for one request."""

    new_logprobs: SampledLogprobs | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class StepOutputs(EngineCoreOutputs, array_like=True, omit_defaults=True, gc=False):
    """The outputs of a step."""

    outputs: list[RequestOutput] = []  # pyright: ignore[reportIncompatibleVariableOverride]


class StepDecoder:
    """A replacement for vLLM's decoder, which would make three numpy arrays for each token."""

    def __init__(self, decoder: Any) -> None:
        self._of_vllm = decoder
        self._decoder = msgpack.Decoder(StepOutputs, ext_hook=decoder.ext_hook, dec_hook=decoder.dec_hook)

    def decode(self, frames: Sequence[Any]) -> StepOutputs:
        """Decode a message. The first frame is the message, and the others are arrays that are too large for it."""
        self._of_vllm.aux_buffers = frames
        try:
            message = self._decoder.decode(frames[0])
        finally:
            self._of_vllm.aux_buffers = ()
        if len(frames) > 1:
            for output in message.outputs:
                if output.new_logprobs is not None:
                    output.new_logprobs.frames = frames
        return message


class TokenStream:
    """The tokens of one request that its reader has not taken yet. At `wakes_at` tokens, the reader is woken.

    `support_width` is that of the request's `Sampling`.
    """

    def __init__(self, wakes_at: int, support_width: int) -> None:
        self.wakes_at = wakes_at
        self._width = support_width
        # vLLM's internal id of the request, which is known after the request's first output.
        self.internal_id: str | None = None
        self.token_ids = array("i")
        self._logprobs = bytearray()
        self._support: list[NDArray[np.int32]] = []
        self._experts: list[NDArray[Any]] = []
        self._num_experts = 0

    def add(self, output: RequestOutput) -> None:
        self.token_ids.extend(output.new_token_ids)
        if (found := output.new_logprobs) is not None:
            logprobs = found.table(found.values, "<f4")
            self._logprobs += logprobs[:, 0].tobytes()
            if self._width:
                ids = found.table(msgpack.decode(found.token_ids), "<i4")
                self._support += map(support_row, ids[:, 1:], logprobs[:, 1:], repeat(self._width))
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)

    def take(self, finish_reason: FinishReason | None = None) -> Delta:
        """Return all tokens as the next part of the response."""
        token_ids, logprobs = self.token_ids, self._logprobs
        assert len(logprobs) == 4 * len(token_ids), f"{len(logprobs)} bytes of logprobs for {len(token_ids)} tokens"
        # The delta has views of these arrays, so the next tokens need new ones.
        self.token_ids, self._logprobs = array("i"), bytearray()
        experts, start = None, self._num_experts
        if self._experts:
            experts = np.concatenate(self._experts).astype(np.int16)
            self._experts = []
            self._num_experts += len(experts)
        support, self._support = self._support, []
        return Delta(
            np.frombuffer(token_ids, np.int32),
            np.frombuffer(logprobs, np.float32),
            finish_reason,
            experts,
            start,
            np.concatenate(support) if support else (),
        )


class TokenStreams:
    """The streams of all requests of one engine."""

    def __init__(self, llm: Any, chunk_tokens: int, longest_s: float) -> None:
        """Replace the decoder of this AsyncLLM. Call this on its event loop, before its first request.

        A reader is woken when a chunk of `chunk_tokens` tokens is full, or `longest_s` seconds after a token came.
        """
        core = llm.engine_core
        assert core.resources.output_queue_task is None, "vLLM reads messages already, with its own decoder"
        core.decoder = StepDecoder(core.decoder)
        self._next_message = core.get_output_async
        core.get_output_async = self._next
        # With a larger interval, vLLM would delay outputs that must wake a request.
        llm.output_processor.stream_interval = 1
        self._llm = llm
        self._chunk_tokens = chunk_tokens
        self._longest_s = longest_s
        # vLLM's statistics count only outputs that reach AsyncLLM. So if they are on, all outputs are passed to it.
        self._passes_all: bool = llm.log_stats
        self._by_request: dict[str, TokenStream] = {}
        self._by_internal_id: dict[str, TokenStream] = {}
        self._marks: list[asyncio.Event] = []
        self._reminder: asyncio.TimerHandle | None = None

    def open(self, request_id: str, support_width: int, *, each_step: bool) -> TokenStream:
        """Return the stream of a new request. With `each_step` its reader is woken for every token."""
        stream = self._by_request[request_id] = TokenStream(1 if each_step else self._chunk_tokens, support_width)
        return stream

    def close(self, request_id: str) -> None:
        stream = self._by_request.pop(request_id)
        if stream.internal_id is not None:
            del self._by_internal_id[stream.internal_id]

    async def drained(self) -> None:
        """Wait until readers have taken all tokens that vLLM's engine had sent before this call."""
        # The mark comes after all earlier messages in the queue, so their readers are woken first.
        mark = asyncio.Event()
        self._put(mark)
        await mark.wait()

    def _put(self, mark: asyncio.Event) -> None:
        self._llm.engine_core.outputs_queue.put_nowait(mark)
        self._llm._run_output_handler()

    async def _next(self) -> EngineCoreOutputs:
        """Return the next outputs for AsyncLLM's output handler, which has handled all earlier outputs by now."""
        marks, self._marks = self._marks, []
        for mark in marks:
            mark.set()
        while True:
            message: StepOutputs | asyncio.Event = await self._next_message()
            if isinstance(message, asyncio.Event):
                if waking := [
                    RequestOutput(name, []) for name, stream in self._by_internal_id.items() if stream.token_ids
                ]:
                    self._marks.append(message)
                    return StepOutputs(outputs=waking)
                message.set()
            elif self._take(message):
                return message

    def _take(self, message: StepOutputs) -> bool:
        """Take the tokens out of a message, and return whether AsyncLLM needs the rest of the message."""
        waking: list[RequestOutput] = []
        for output in message.outputs:
            stream = self._by_internal_id.get(output.request_id)
            is_first = stream is None
            if stream is None and (stream := self._found(output.request_id)) is None:
                # A request without a stream was aborted, and vLLM handles its outputs.
                waking.append(output)
                continue
            stream.add(output)
            if (
                is_first
                or output.finish_reason is not None
                or len(stream.token_ids) >= stream.wakes_at
                or self._passes_all
            ):
                output.new_logprobs = output.routed_experts = None
                waking.append(output)
        if len(waking) < len(message.outputs) and self._reminder is None:
            self._reminder = asyncio.get_running_loop().call_later(self._longest_s, self._remind)
        message.outputs = waking
        return bool(waking) or message.scheduler_stats is not None

    def _found(self, internal_id: str) -> TokenStream | None:
        state = self._llm.output_processor.request_states.get(internal_id)
        stream = None if state is None else self._by_request.get(state.external_req_id)
        if stream is not None:
            stream.internal_id = internal_id
            self._by_internal_id[internal_id] = stream
        return stream

    def _remind(self) -> None:
        self._reminder = None
        # Nobody waits for this mark, but it wakes all readers.
        self._put(asyncio.Event())
