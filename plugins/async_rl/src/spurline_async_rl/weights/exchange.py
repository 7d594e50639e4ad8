"""Make process groups for a sender of weights and the workers of engines, with NCCL for GPUs and gloo for CPUs.

The members find each other through a TCP store of the controller. A member that notices a failure writes it into the
store. The others check the store while they wait, because neither NCCL nor gloo reports failures reliably.
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
"""Seconds between two checks of the store."""
_HERE, _GOT, _FAILED = "here", "got", "failed"
"""Keys of the store. `here/RANK` says that a member has joined, and `got/RANK` how many broadcasts it has received."""
_SLOWER = {"cpu": 1.5, "cuda": 10}
"""torch's time limit is `limit_s` times this factor, because NCCL ends the whole process at torch's time limit."""


@dataclass(frozen=True)
class Meeting:
    """The plain data with which members of process groups find each other.

    Attributes:
        host: Host of the store.
        port: Port of the store.
        name: Unique name of the meeting in the store. If one group of a meeting fails, all its groups fail.
        receivers: The number of workers of each engine. The sender has rank 0, and the workers follow in this order.
        device: The device of the sender's weights. Groups use NCCL for `cuda` and gloo for `cpu`.
        limit_s: Time limit in seconds, both for joining a group and for each broadcast.
        group: Name of the group within the meeting. Each sender has a group of its own.
    """

    host: str
    port: int
    name: str
    receivers: Mapping[str, int]
    device: Literal["cpu", "cuda"]
    limit_s: float
    group: str = ""

    def end(self, store: Any, why: str, receiver: str = "") -> None:
        """Make all groups of the meeting fail for this reason, or that of one receiver, unless they have failed."""
        # If this fails, they wait until the time limit.
        with suppress(Exception):
            if self.failure(store, receiver) is None:
                PrefixStore(self.name, store).set(_FAILED + receiver, why)

    def failure(self, store: Any, receiver: str = "") -> str | None:
        """Return the reason that `end` was given, or None."""
        keys = PrefixStore(self.name, store)
        return keys.get(_FAILED + receiver).decode() if keys.check([_FAILED + receiver]) else None

    @property
    def members(self) -> list[str]:
        """Return the names of all members, by rank."""
        engines = self.receivers.items()
        return ["the sender", *(self._name(engine, worker) for engine, count in engines for worker in range(count))]

    def rank_of(self, receiver: str, worker: int) -> int:
        return self.members.index(self._name(receiver, worker))

    def _name(self, receiver: str, worker: int) -> str:
        return f"worker {worker} of {receiver}" if self.receivers[receiver] > 1 else receiver


class ExchangeGroup:
    """A process's membership in a group. The constructor waits until all join, or raises BucketLostError."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._count = 0
        self._work: Any = None
        limit = timedelta(seconds=meeting.limit_s)
        self._store: Any = None
        try:
            self._store = TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
            self._keys: Any = PrefixStore(f"group {meeting.group}", PrefixStore(meeting.name, self._store))
            self._keys.set(f"{_HERE}/{rank}", "")
            self._wait_for_all()
            self._group: Any = _make(PrefixStore("group", self._keys), rank, meeting)
        except Exception as error:  # noqa: BLE001 - raised as another
            raise self._lost("cannot join the group that brings weights", error) from None

    def broadcast(self, buffer: Tensor) -> None:
        """Send a uint8 tensor from rank 0 to all others. All members need tensors of equal size and type of device.

        Raises:
            BucketLostError: If the broadcast fails or takes too long. The error names the members that did not get it.
        """
        self._count += 1
        try:
            self._broadcast(buffer)
            self._keys.set(f"{_GOT}/{self._rank}", str(self._count))
        except Exception as error:  # noqa: BLE001 - raised as another
            # `lost` is raised after this block, because the frames of `error` would keep the group alive.
            lost = self._lost(f"{'did not get' if self._rank else 'lost'} a bucket of weights", error)
        else:
            return
        self.leave()
        raise lost

    def leave(self) -> None:
        """Leave the group. A second call has no effect."""
        group, work = self._group, self._work
        self._group = self._work = None
        if group is not None and not isinstance(group, dist.ProcessGroupGloo):
            # Otherwise NCCL's kernels would go on waiting.
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
                raise _LateError(f"the broadcast did not end within {self._meeting.limit_s:g} s")
        # This raises the error of the broadcast, if any.
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
                raise _LateError(f"{listing(missing)} did not join within {limit_s:g} s")
            time.sleep(10 * _POLL_S)
        self._check()

    def _check(self) -> None:
        """Raise the failure that another member or the controller has written into the store."""
        if (failure := self._meeting.failure(self._store)) is not None:
            raise _LateError(failure)

    def _lost(self, what: str, error: Exception) -> BucketLostError:
        """Return the error to raise, and write it into the store."""
        kind = "" if isinstance(error, _LateError) else f"{type(error).__name__}: "
        said = str(error).partition("\n")[0]
        text = f"{self._meeting.members[self._rank]} {what}: {kind}{said}".rstrip(".")
        with suppress(Exception):
            if self._store is not None and self._meeting.failure(self._store) is None:
                text += self._who_is_behind()
                self._meeting.end(self._store, text)
        return BucketLostError(f"{text}.")

    def _who_is_behind(self) -> str:
        behind: list[str] = []
        for rank, name in list(enumerate(self._meeting.members))[1:]:
            key = f"{_GOT}/{rank}"
            got = int(self._keys.get(key)) if self._keys.check([key]) else 0
            if got < self._count:
                behind.append(name)
        return f". It did not reach {listing(behind)}" if behind else ""


class _LateError(Exception):
    """An error that messages show without the name of its class."""


_LEFT: list[tuple[Any, Any]] = []
"""Gloo groups that were left, with their last broadcast. Freeing a group during a broadcast would block all threads."""


def _keep_left() -> None:
    """Keep the groups of `_LEFT` from being freed when the process ends. Freeing them would delay the end."""
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
    """Return the address from which this machine would reach the host. Nothing is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return probe.getsockname()[0]
