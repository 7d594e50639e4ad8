"""Make a process group for one sender of weights and the workers of engines, on CPUs and GPUs alike.

It exists beside other groups of the processes, over a TCP store of the controller: with NCCL if the sender's weights
are on GPUs, else with gloo. A member that notices a failure writes it into the store, where all others look while they
wait, as neither library tells them reliably.
"""

from __future__ import annotations

import atexit
import ctypes
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage] - documented, not listed
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from spurline.errors import BucketLostError, listing

_POLL_S = 0.001
_LOOK_S = 0.1
"""Seconds between two looks at the store."""
_HERE, _GOT, _FAILED = "here", "got", "failed"
"""Keys of the store: by rank, whether it has come and how many broadcasts it has got; and the failure."""
_SLOWER = {"cpu": 1.5, "cuda": 10}
"""Factors of torch's own time limits, which must end after ours: NCCL's ends the whole process, and a gloo group is
freed only when its last exchange has ended."""


@dataclass(frozen=True)
class Meeting:
    """The place where a group meets, as plain data.

    Attributes:
        host: Host of the store.
        port: Port of the store.
        name: Used once in the store; what fails in one group of a meeting fails in all.
        receivers: Workers of each engine, in the order of their ranks, which begin behind the sender's, 0.
        device: Where the sender's weights are.
        limit_s: Seconds that joining, or one broadcast, may take.
        group: Name of one sender's group within the meeting.
    """

    host: str
    port: int
    name: str
    receivers: Mapping[str, int]
    device: Literal["cpu", "cuda"]
    limit_s: float
    group: str = ""

    def end(self, store: Any, why: str) -> None:
        """Make all groups of the meeting fail for this reason, unless one has failed already."""
        keys = PrefixStore(self.name, store)
        if not keys.check([_FAILED]):
            keys.set(_FAILED, why)

    @property
    def members(self) -> list[str]:
        """The names of all members, by rank."""
        engines = self.receivers.items()
        return ["the sender", *(self._name(engine, worker) for engine, count in engines for worker in range(count))]

    def rank_of(self, receiver: str, worker: int) -> int:
        return self.members.index(self._name(receiver, worker))

    def _name(self, receiver: str, worker: int) -> str:
        return f"worker {worker} of {receiver}" if self.receivers[receiver] > 1 else receiver


class ExchangeGroup:
    """The membership of one process. Raises BucketLostError, naming the missing, if the group is not made in time."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._count = 0
        self._work: Any = None
        limit = timedelta(seconds=meeting.limit_s)
        self._common: Any = None
        try:
            store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
            self._common = PrefixStore(meeting.name, store)
            self._keys: Any = PrefixStore(f"group {meeting.group}", self._common)
            self._keys.set(f"{_HERE}/{rank}", "")
            self._wait_for_all()
            self._group: Any = _make(PrefixStore("group", self._keys), rank, meeting)
        except Exception as error:  # noqa: BLE001 - raised as another
            raise self._lost("cannot join the group that brings weights", error) from None

    def broadcast(self, buffer: Tensor) -> None:
        """Send a uint8 tensor of one size everywhere, on the device of the meeting, from rank 0 to all others.

        Raises:
            BucketLostError: If that fails or takes too long; names the members that have not got it.
        """
        self._count += 1
        try:
            self._broadcast(buffer)
            self._keys.set(f"{_GOT}/{self._rank}", str(self._count))
        except Exception as error:  # noqa: BLE001 - raised as another
            # Raised below, as the frames of this error would keep the exchange and its group.
            lost = self._lost(f"{'did not get' if self._rank else 'lost'} a bucket of weights", error)
        else:
            return
        self.leave()
        raise lost

    def leave(self) -> None:
        """End the membership. May be called again."""
        group, work = self._group, self._work
        self._group = self._work = None
        if group is not None and not isinstance(group, dist.ProcessGroupGloo):
            # NCCL's kernels would wait on.
            group.abort()
        elif work is not None and not work.is_completed():
            _LEFT.append((group, work))
        _LEFT[:] = [left for left in _LEFT if not left[1].is_completed()]

    def _broadcast(self, buffer: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        began = looked = time.monotonic()
        self._work = work = self._group.broadcast([buffer], options)
        while not work.is_completed():
            time.sleep(_POLL_S)
            if (now := time.monotonic()) - looked >= _LOOK_S:
                looked = now
                self._check()
            if now - began >= self._meeting.limit_s:
                raise _LateError(f"it did not end within {self._meeting.limit_s:g} s (exchange_timeout_s)")
        # Raises what went wrong.
        work.wait()
        self._work = None
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)

    def _wait_for_all(self) -> None:
        limit_s = self._meeting.limit_s
        began = time.monotonic()
        members = self._meeting.members
        while missing := [name for rank, name in enumerate(members) if not self._keys.check([f"{_HERE}/{rank}"])]:
            self._check()
            if time.monotonic() - began >= limit_s:
                raise _LateError(f"{listing(missing)} did not come within {limit_s:g} s (exchange_timeout_s)")
            time.sleep(10 * _POLL_S)
        self._check()

    def _check(self) -> None:
        """Raise the failure that another member, or the controller, has written."""
        if self._common.check([_FAILED]):
            raise _LateError(self._common.get(_FAILED).decode())

    def _lost(self, what: str, error: Exception) -> BucketLostError:
        """Return the error to raise, and write it for the others."""
        kind = "" if isinstance(error, _LateError) else f"{type(error).__name__}: "
        said = str(error).partition("\n")[0]
        text = f"{self._meeting.members[self._rank]} {what}: {kind}{said}".rstrip(".")
        with suppress(Exception):
            # If the store is lost, nobody waits for long.
            if self._common is not None and not self._common.check([_FAILED]):
                text += self._who_is_behind()
                self._common.set(_FAILED, text)
        return BucketLostError(f"{text}.")

    def _who_is_behind(self) -> str:
        behind: list[str] = []
        for rank, name in list(enumerate(self._meeting.members))[1:]:
            key = f"{_GOT}/{rank}"
            got = int(self._keys.get(key)) if self._keys.check([key]) else 0
            if got < self._count:
                behind.append(name)
        return f". Without it: {listing(behind)}" if behind else ""


class _LateError(Exception):
    """An error that is shown without the name of its class."""


_LEFT: list[tuple[Any, Any]] = []
"""gloo groups that were left, with their last exchange, which ends by a limit of its own. Freeing a group before would
wait for that and stop all other threads."""


def _keep_left() -> None:
    """Keep them at the end of the process, so that nobody waits for them."""
    for group, _ in _LEFT:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


atexit.register(_keep_left)


def _make(store: Any, rank: int, meeting: Meeting) -> Any:
    limit = timedelta(seconds=_SLOWER[meeting.device] * meeting.limit_s)
    if meeting.device == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, len(meeting.members), options)
    options: Any = cast("Any", dist.ProcessGroupGloo)._Options()
    options._timeout = limit
    # Use the network over which the store is reached.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address_towards(meeting.host))]
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, len(meeting.members), options)


def address_towards(host: str) -> str:
    """Return the address under which machines in the network of the host reach this one. Sends nothing."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return probe.getsockname()[0]
