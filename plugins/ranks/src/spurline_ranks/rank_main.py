"""Run a rank in this process: join the other ranks, make the worker, and call its methods.

This is the child of `LocalRanks`. Modules that are slow to import are imported when the process can already be asked
for its stacks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta
from operator import attrgetter
from pkgutil import resolve_name
from queue import SimpleQueue
from typing import Any

from spurline.importing import importing
from spurline_concurrency.child import Parent
from spurline_ranks.group import MachineOrder, Place
from spurline_ranks.logs import mark_beginning
from spurline_ranks.outcomes import outcome_of, unpacked


def main(parent: Parent) -> None:
    # A job scheduler sends these signals to all processes of a job. Only the controller handles them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # On this signal a rank writes its stacks, even while it hangs in C code.
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    mark_beginning(2)
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    received: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(parent, received), name="messages", daemon=True).start()
    rank = _Rank(parent, *unpacked(received.get()["order"]))
    parent.send({"outcome": outcome_of(rank.start)})
    while True:
        parent.send({"outcome": outcome_of(rank.call, received.get())})


def _listen(parent: Parent, received: SimpleQueue[Any]) -> None:
    """Receive calls. Kill this process when the parent is gone."""
    try:
        for messages in parent.messages():
            for message in messages:
                received.put(message)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


class _Rank:
    def __init__(self, parent: Parent, order: MachineOrder, rank: int) -> None:
        self._parent, self._order, self._rank = parent, order, rank
        self._worker: Any = None

    def start(self) -> None:
        """Join the other ranks, and make the worker."""
        order = self._order
        self._say(f"importing {order.worker}")
        with importing():
            make_worker = resolve_name(order.worker)
        self._join()
        self._say(f"making {order.worker}")
        place = Place(self._rank, order.request.count, self._rank - order.ranks.start, order.node, self._say)
        self._worker = make_worker(place, *order.arguments)
        self._limit_exchanges()
        self._say("waiting for a call")

    def call(self, call: Mapping[str, Any]) -> Any:
        """Call a method of the worker."""
        self._say(f"in `{call['method']}`")
        try:
            return attrgetter(call["method"])(self._worker)(*unpacked(call["own"]), *unpacked(call["common"]))
        finally:
            self._say(f"waiting for a call, `{call['method']}` is done")

    def _say(self, work: str) -> None:
        self._parent.send({"work": work})

    def _join(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage] - documented, not listed

        from spurline_models.device_profile import device_profile
        from spurline_models.machine import num_cores

        request, limits = self._order.request, self._order.limits
        torch.set_num_threads(request.num_threads or max(1, num_cores() // len(self._order.ranks)))
        profile = device_profile(request.device)
        host, port = self._order.store
        self._say(f"joining the other ranks at {host}:{port}")
        # The store's timeout is for ranks that start late. The group's timeout is for each exchange.
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limits.start_s))
        dist.init_process_group(
            profile.process_group,
            store=store,
            rank=self._rank,
            world_size=request.count,
            timeout=timedelta(seconds=limits.collective_s),
            device_id=profile.device if request.device == "cuda" else None,
        )

    def _limit_exchanges(self) -> None:
        """Set the timeout of an exchange in all groups that the worker has opened, such as those of a `DeviceMesh`.

        Otherwise groups have the default timeouts of torch, in which there is no public function that changes them.
        """
        from torch.distributed.distributed_c10d import _set_pg_timeout, _world

        for group in _world.pg_map:
            _set_pg_timeout(timedelta(seconds=self._order.limits.collective_s), group)
