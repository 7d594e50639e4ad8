"""Weight sync `collective`: send each bucket by one broadcast to all workers, on any machine.

The sender packs a bucket into a buffer. The buffer is broadcast in a process group of the sender and all workers, with
gloo from CPUs and with NCCL from GPUs. If the engines change or a broadcast fails, a new group is made, and a lost
bucket is sent again.
"""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as StillRunningError
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from spurline.errors import BucketLostError, RunFailedError, listing
from spurline.threads import call_on_daemon
from spurline_async_rl.weights.buckets import BucketSync, end_of, pack, room, unpack, weights_on_gpu
from spurline_async_rl.weights.configs import CollectiveSyncConfig, VllmNativeSyncConfig
from spurline_async_rl.weights.exchange import ExchangeGroup, Meeting, address_towards
from spurline_models.weight_buckets import TensorPlace, WeightBucket
from spurline_ranks.store import open_store

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig

_MEETING, _NUMBER, _FAILED = "meeting", "number", "failed"
"""Keys of a bucket's `where`: the `Meeting` and [version, number], or only the reason why the last bucket was lost."""
_JOIN_AND_SEND = 2.5
"""Joining and sending end within this multiple of the time limit, unless a call hangs. NCCL hangs if a process dies."""
_FAR_AWAY = "192.0.2.1"
"""An unused address (RFC 5737). The route to it shows which network reaches other machines."""


class CollectiveSync(BucketSync):
    """A `WeightSync` that broadcasts buckets.

    If an engine does not join the group or receive a bucket within `limit_s` seconds, the bucket is sent again to the
    engines that still run.
    """

    transport = "collective"
    maker = f"{__name__}:BroadcastMaker"
    made_by = "owners"
    makes_ahead = True

    def __init__(self, config: CollectiveSyncConfig | VllmNativeSyncConfig, run: RunConfig | None = None) -> None:
        super().__init__(config, run)
        engine_limit_s = None if run is None else run.source.facts.update_limit_s
        # A bucket must be given up before the engines that wait for it would be killed.
        self.limit_s = config.timeout_s / 10 if engine_limit_s is None else engine_limit_s / 2
        self._device: Literal["cpu", "cuda"] = "cuda" if weights_on_gpu(run) else "cpu"
        self._host = config.address or ("127.0.0.1" if _all_here(run) else _own_address())
        self._store: Any = None
        self._numbers = itertools.count()
        self._receivers: Mapping[str, int] = {}
        self._meeting: Meeting | None = None

    def prepare(self, receivers: Mapping[str, int], *, is_lost: bool) -> None:
        # If engines only ended, `vllm_native` goes on with the groups of the others.
        self.note_receivers(receivers)
        if self._meeting is not None and receivers == self._receivers and not is_lost:
            return
        self._give_up("weights are sent through a new group")
        if self._store is None:
            self._store = self._open_store()
        self._receivers = dict(receivers)
        # Several runs may share a server, so the name must be unique among runs.
        name = f"{os.getpid()}-{self._store.port}-{next(self._numbers)}"
        self._meeting = Meeting(self._host, self._store.port, name, self._receivers, self._device, self.limit_s)

    def note_receivers(self, receivers: Mapping[str, int]) -> None:
        if gone := [name for name in self._receivers if name not in receivers]:
            self._give_up(f"{listing(gone)} ended while weights were on their way")

    def maker_settings(self) -> dict[str, Any]:
        assert self._meeting is not None
        return {"meeting": asdict(self._meeting)}

    def check(self, bucket: WeightBucket) -> None:
        if _FAILED in bucket.where:
            raise BucketLostError(bucket.where[_FAILED])

    def close(self) -> None:
        # Otherwise closing would wait for a maker that is still sending.
        self._give_up("no more weights are sent")
        super().close()
        self._meeting = None
        self._store = None

    def _give_up(self, why: str) -> None:
        """Make all members of the last groups stop waiting."""
        if self._meeting is not None and self._store is not None:
            self._meeting.end(self._store, why)

    def _open_store(self) -> Any:
        try:
            return open_store(self._host, timedelta(seconds=self.limit_s))
        except Exception as error:
            raise RunFailedError(
                f"Weights could not be sent, because this machine did not reach itself as {self._host} within "
                f"{self.limit_s:g} s: {str(error).partition(chr(10))[0]}. Set source.weight_sync.address to its name "
                "or address in the network of ranks and engines."
            ) from error


class BroadcastMaker:
    """A `BucketMaker`. `meeting` has the fields of a `Meeting`. Each sender has its own group.

    If a broadcast failed, the next bucket has the reason instead of weights, because an error would end the training.
    """

    def __init__(self, meeting: Mapping[str, Any], sender: int = 0, senders: int = 1) -> None:
        # Several makers may exist for a meeting, one after the other, so the name of the group is random.
        self._meeting = replace(Meeting(**meeting), group=f"{sender}.{secrets.token_hex(4)}")
        self._group: ExchangeGroup | None = None
        # The broadcast of the last bucket, which returns its error.
        self._sent: Future[Exception | None] | None = None
        self._sent_at = 0.0
        self._buffer: Tensor | None = None

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        # Gather the weights first, while the last bucket is being sent from the buffer.
        held = list(weights)
        if (failure := self._failure()) is not None:
            return WeightBucket(CollectiveSync.transport, (), {_FAILED: failure})
        self._buffer, places = pack(held, self._buffer, torch.device(self._meeting.device))
        held.clear()
        where: dict[str, Any] = {_MEETING: asdict(self._meeting), _NUMBER: [version, number]}
        if self._buffer.is_cuda:
            torch.cuda.current_stream().synchronize()
        if self._meeting.receivers:
            self._sent_at = time.monotonic()
            # The call may hang.
            self._sent = call_on_daemon("spurline-broadcast", self._broadcast, self._buffer[: _size_of(places)])
        return WeightBucket(CollectiveSync.transport, places, where)

    def taken(self) -> None:
        # A failure is reported by the receivers or by the next bucket.
        if self._sent is not None and self._failure() is None:
            self._sent = None
        self._buffer = None

    def close(self) -> None:
        self.taken()
        if self._group is not None:
            self._group.leave()

    def _failure(self) -> str | None:
        """Wait until the last send ends, within a time limit, and return why it failed, or None."""
        if self._sent is None:
            return None
        limit_s = _JOIN_AND_SEND * self._meeting.limit_s
        try:
            error = self._sent.result(max(0.0, self._sent_at + limit_s - time.monotonic()))
        except StillRunningError:
            return f"the sender did not come back from a broadcast within {limit_s:g} s."
        return None if error is None else str(error)

    def _broadcast(self, buffer: Tensor) -> Exception | None:
        if buffer.is_cuda:
            torch.cuda.set_device(buffer.device)
        try:
            self._group = self._group or ExchangeGroup(self._meeting, 0)
            self._group.broadcast(buffer)
        except Exception as error:  # noqa: BLE001 - returned
            # The frames in the traceback would keep the buffer alive.
            return error.with_traceback(None)
        return None


class BroadcastReader:
    """Receives broadcasts in one worker of an engine: on `device` with NCCL, and on the CPU with gloo."""

    def __init__(self, worker: int = 0, device: torch.device | None = None) -> None:
        self._worker, self._device = worker, device
        self._groups: dict[str, ExchangeGroup] = {}
        self._meeting = ""
        self._buffer: Tensor | None = None
        self._last: Sequence[int] = ()

    def read(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """Return the weights, as views of a buffer that the next bucket overwrites.

        If this worker has received the same bucket before, return [].

        Raises:
            BucketLostError: If the bucket does not arrive.
            RunFailedError: If the bucket is sent with NCCL, and this worker is on a CPU.
        """
        where = bucket.where
        meeting = Meeting(**where[_MEETING])
        if meeting.device == "cuda" and (self._device is None or self._device.type != "cuda"):
            raise RunFailedError(
                f"{bucket.receiver} is on a CPU, but NCCL sends weights only to GPUs. Set source.weight_sync: "
                "shared_memory, or disk if the engine is on another machine."
            )
        device = self._device if meeting.device == "cuda" and self._device is not None else torch.device("cpu")
        group = self._group_of(meeting, bucket.receiver)
        size = _size_of(bucket.places)
        self._buffer = room(self._buffer, size, device)
        buffer = self._buffer[:size]
        try:
            group.broadcast(buffer)
        except BucketLostError:
            self._groups.pop(meeting.group)
            raise
        if where[_NUMBER] == self._last:
            # This bucket was sent again, because another engine did not get it.
            return []
        self._last = where[_NUMBER]
        return unpack(buffer, bucket.places)

    def forget(self) -> None:
        """Forget the last bucket, so that it is returned when it is sent again."""
        self._last = ()

    def end_update(self) -> None:
        """Free the memory, and forget the last bucket.

        This is also called before an update, because an earlier run may have been killed during an update.
        """
        self._buffer = None
        self.forget()

    def close(self) -> None:
        for group in self._groups.values():
            group.leave()
        self._groups.clear()

    def _group_of(self, meeting: Meeting, receiver: str) -> ExchangeGroup:
        if meeting.name != self._meeting:
            self.close()
            self._meeting = meeting.name
        if meeting.group not in self._groups:
            self._groups[meeting.group] = ExchangeGroup(meeting, meeting.rank_of(receiver, self._worker))
        return self._groups[meeting.group]


def _size_of(places: Sequence[TensorPlace]) -> int:
    """Return the bytes to broadcast, at least one."""
    return max(1, end_of(places))


def _all_here(run: RunConfig | None) -> bool:
    """Return whether all ranks and engines of the run are on this machine."""
    if run is None:
        return True
    request = run.backend.rank_request()
    return not run.source.facts.engines_elsewhere and (request is None or request.launch == "local")


def _own_address() -> str:
    with suppress(OSError):
        return address_towards(_FAR_AWAY)
    return "127.0.0.1"
