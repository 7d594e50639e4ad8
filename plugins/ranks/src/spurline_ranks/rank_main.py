"""Run a rank in this process: choose its device, join the other ranks, make the worker, and call its methods."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

from spurline.protocols.ranks import RankRequest
from spurline_models.device_profile import device_profile
from spurline_models.machine import num_cores
from spurline_ranks.group import Place, TimeLimits
from spurline_ranks.outcomes import Raised, Value, pack


@dataclass(frozen=True)
class RankOrder:
    """Everything that a process needs to become a rank.

    Attributes:
        request: The request for all ranks.
        local_world: The number of ranks on this rank's machine.
        node: The name of this rank's machine in messages.
        worker: `module:Class` of the worker. The class takes a `Place` and then the `arguments`.
        store: Host and port of the store that the ranks use to find each other.
        environment: Variables to add to the environment of the process.
    """

    request: RankRequest
    rank: int
    local_rank: int
    local_world: int
    node: str
    worker: str
    arguments: tuple[Any, ...]
    limits: TimeLimits
    store: tuple[str, int]
    environment: Mapping[str, str]


class RankMain:
    """One rank. Calls must not overlap, except that any thread may call `doing` at any time."""

    def __init__(self, order: RankOrder) -> None:
        self._order = order
        self._doing = ("starting", time.monotonic())
        self._worker: Any = None

    def start(self) -> bytes:
        """Join the other ranks, make the worker, and return the packed outcome."""
        try:
            os.environ.update(self._order.environment)
            self._join()
            self.say(f"making {self._order.worker}")
            order = self._order
            place = Place(order.rank, order.request.count, order.local_rank, order.node, self.say)
            self._worker = resolve_name(order.worker)(place, *order.arguments)
        except BaseException as error:  # noqa: BLE001 - raised where the ranks were asked for
            return pack(Raised.of(error))
        self.say("waiting for a call")
        return pack(Value(None))

    def call(self, method: str, arguments: Sequence[Any]) -> bytes:
        """Call a method of the worker, and return the packed outcome."""
        self.say(f"in `{method}`")
        try:
            return pack(Value(attrgetter(method)(self._worker)(*arguments)))
        except BaseException as error:  # noqa: BLE001 - raised where the call was made
            return pack(Raised.of(error))
        finally:
            self.say(f"waiting for a call, `{method}` is done")

    def say(self, text: str) -> None:
        self._doing = (text, time.monotonic())

    def doing(self) -> str:
        """Return a text that tells what the rank does and for how long."""
        text, since = self._doing
        return f"{text}, for {time.monotonic() - since:.0f} s"

    def _join(self) -> None:
        order = self._order
        torch.set_num_threads(order.request.num_threads or max(1, num_cores() // order.local_world))
        profile = device_profile(order.request.device)
        host, port = order.store
        self.say(f"joining the other ranks at {host}:{port}")
        # The store's timeout is for ranks that start late. The group's timeout is for each exchange.
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=order.limits.start_s))
        dist.init_process_group(
            profile.process_group,
            store=store,
            rank=order.rank,
            world_size=order.request.count,
            timeout=timedelta(seconds=order.limits.collective_s),
            device_id=profile.device if order.request.device == "cuda" else None,
        )
