"""Call a stock vLLM server over its own endpoints, in place of the methods of our worker extension."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from spurline.errors import RunFailedError
from spurline_async_rl.weights.vllm_native import GROUPS
from spurline_models.weight_buckets import WeightBucket

_MARK = "spurline"


class StockWorkers:
    """Carries out the calls of `WorkerExtension` that a run needs for whole weights.

    A stock server has no place for the claim of a run except the name of its weights' version, which vLLM keeps and
    does not use. Each call of the run writes a mark there. A mark that another run has not rewritten for as long as a
    claim lasts is void. Runs of Spurline respect the marks of others, and the server itself obeys everyone.

    Args:
        ask: Calls an endpoint, given by verb, path and body, and returns the value of a key of the answer.
    """

    def __init__(self, ask: Callable[[str, str, Any, str], Awaitable[Any]]) -> None:
        self._ask = ask
        self._one_at_a_time = asyncio.Lock()
        self._last_mark, self._marked_at = "", 0.0
        self._is_clean = False
        self._group: Mapping[str, Any] = {}

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Do what the method of `WorkerExtension` does, and return its result as that of a single worker."""
        return [await getattr(self, method)(*arguments)]

    async def spurline_call(self, owner: str, lease_s: float, method: str, *arguments: Any) -> dict[str, Any]:
        async with self._one_at_a_time:
            mark, now = await self._read_mark(), time.monotonic()
            process, claim, holder = _parsed(mark)
            if mark != self._last_mark:
                self._last_mark, self._marked_at = mark, now
            rest_s = self._marked_at + lease_s - now
            if holder not in ("", owner) and rest_s > 0:
                return {"answer": None, "owner": holder, "rest_s": rest_s}
            if holder != owner:
                # Only a server that was started meanwhile has no mark at all.
                process, claim = process or uuid.uuid4().hex, uuid.uuid4().hex
            await self._write_mark(process, claim, owner)
        answer = (await self.call(method, *arguments))[0] if method else None
        return {"answer": answer, "claim": f"{process} {claim}"}

    async def spurline_end_claim(self, owner: str) -> None:
        process, claim, holder = _parsed(await self._read_mark())
        if holder == owner:
            await self._write_mark(process, claim, "")

    async def spurline_begin_update(self) -> None:
        if not self._is_clean:
            # vLLM would count weights of an update that did not end here, such as that of a killed run, in this one.
            with suppress(RunFailedError):
                await self._post("start_weight_update")
            await self._post("finish_weight_update")
        self._is_clean = False
        await self._post("start_weight_update")

    async def spurline_load_bucket(self, plain: dict[str, Any]) -> None:
        bucket = WeightBucket.from_plain(plain)
        group = bucket.where[GROUPS][bucket.receiver]
        if group != self._group:
            await self._post("init_weight_transfer_engine", {"init_info": group})
            self._group = group
        names, dtypes, shapes = zip(*((place.name, place.dtype, place.shape) for place in bucket.places), strict=True)
        await self._post("update_weights", {"update_info": {"names": names, "dtype_names": dtypes, "shapes": shapes}})

    async def spurline_finish_update(self) -> None:
        await self._post("finish_weight_update")
        self._is_clean = True

    async def _read_mark(self) -> str:
        return await self._ask("GET", "/weight_info", None, "weight_version")

    async def _write_mark(self, process: str, claim: str, owner: str) -> None:
        self._last_mark, self._marked_at = f"{_MARK} {process} {claim} {time.time()} {owner}", time.monotonic()
        await self._ask("POST", "/update_weight_version", {"new_version": self._last_mark}, "success")

    async def _post(self, endpoint: str, body: Any = None) -> None:
        await self._ask("POST", f"/{endpoint}", body, "message")


def _parsed(mark: str) -> tuple[str, str, str]:
    """Return the process, the claim and the owner that a mark names; all empty if the text is no mark."""
    kind, process, claim, _, owner = (mark.split(" ", 4) + [""] * 4)[:5]
    return (process, claim, owner) if kind == _MARK else ("", "", "")
