"""An external OpenAI-compatible vLLM server as a member of the pool.

Place on the way: pool -> this -> server -> tokens with their versions. A pause cancels the streams, which go on from
their tokens so far: what was on its way is generated anew, so that no token can get the wrong version.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError
from spurline.protocols.rollout_engine import GenerationRequest, WeightBucket
from spurline.rl.trajectory import FinishReason
from spurline_async_rl.engines.member import EngineDiedError, Progress
from spurline_async_rl.transports.bucket_wire import to_wire
from spurline_async_rl.vllm.launch import check_complete
from spurline_async_rl.vllm.response import Response
from spurline_async_rl.vllm.server_api import ServerApi, ServerModel


class ServerMember:
    """An `EngineMember`. The server is not ours: closing lets it run, and go on."""

    transports: Sequence[str] = ("disk",)

    def __init__(self, name: str, make_api: Callable[[], ServerApi], tokenizer: PreTrainedTokenizerBase):
        """make_api: called on the event loop."""
        self.name = name
        self._make_api = make_api
        self._api: ServerApi | None = None
        self._model = ServerModel("", 0)
        self._tokenizer = tokenizer
        self._version = 0
        self._streams: set[asyncio.Task[FinishReason]] = set()
        self._holds: set[str] = set()
        self._released = asyncio.Event()

    async def start(self) -> None:
        self._api = self._make_api()
        self._model = await self._api.model()
        # A run that ended during a pause leaves the server paused.
        await self._api.resume()

    async def generate(self, request: GenerationRequest, progress: Progress) -> FinishReason:
        while True:
            while self._holds:
                await self._released.wait()
            response = Response(request, progress, self._tokenizer, max_model_len=self._model.max_model_len)
            if response.ended is not None:
                return response.ended
            stream = asyncio.create_task(self._stream(request.name, response))
            self._streams.add(stream)
            try:
                await asyncio.wait({stream})
            finally:
                stream.cancel()
                self._streams.discard(stream)
            if not stream.cancelled():
                return stream.result()

    async def pause(self) -> None:
        await self._hold("pause")

    async def resume(self) -> None:
        await self._release("pause")

    async def begin_update(self, version: int) -> None:
        await self._hold("update")
        await self._opened.workers("spurline_begin_update")

    async def load_bucket(self, bucket: WeightBucket) -> None:
        await self._opened.workers("spurline_load_bucket", to_wire(bucket))

    async def finish_update(self, version: int) -> None:
        check_complete(await self._opened.workers("spurline_finish_update"))
        self._version = version
        await self._release("update")

    async def wait_dead(self) -> str:
        return await self._opened.wait_gone()

    async def close(self) -> None:
        api, self._api = self._api, None
        if api is None:
            return
        for stream in self._streams:
            stream.cancel()
        try:
            if self._holds:
                await api.resume()
        except EngineDiedError as error:
            # It has ended before us.
            del error
        finally:
            await api.close()

    @property
    def _opened(self) -> ServerApi:
        if self._api is None:
            raise EngineDiedError(f"{self.name} is closed")
        return self._api

    async def _stream(self, name: str, response: Response) -> FinishReason:
        try:
            async with contextlib.aclosing(self._opened.complete(self._model.name, response)) as deltas:
                async for delta in deltas:
                    reason = response.add(delta, self._version)
                    if reason is not None:
                        return reason
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        raise EngineDiedError(f"{self.name} left a response without an end")

    async def _hold(self, why: str) -> None:
        self._holds.add(why)
        self._released.clear()
        streams = list(self._streams)
        for stream in streams:
            stream.cancel()
        # Ends: being cancelled, they only close their connections.
        await asyncio.gather(*streams, return_exceptions=True)
        await self._opened.pause()

    async def _release(self, why: str) -> None:
        self._holds.discard(why)
        if not self._holds:
            await self._opened.resume()
            self._released.set()
