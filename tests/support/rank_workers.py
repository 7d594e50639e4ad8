"""Workers for ranks of tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from spurline.errors import DataError
from spurline_ranks.group import Place


class Unreadable:
    def __reduce__(self) -> Any:
        return int, ("no number",)


class Worker:
    def __init__(self, place: Place, *arguments: Any) -> None:
        self.place, self.arguments = place, arguments

    def describe(self) -> dict[str, Any]:
        return {
            "rank": self.place.rank,
            "world": self.place.world,
            "pid": os.getpid(),
            "threads": torch.get_num_threads(),
            "arguments": self.arguments,
            "session": os.getsid(0),
            "folder": os.getcwd(),
            "environment": dict(os.environ),
        }

    def pid(self) -> int:
        return os.getpid()

    def echo(self, *values: Any) -> Any:
        return values

    def sum(self, array: np.ndarray) -> np.ndarray:
        """Return the sum over all ranks."""
        tensor = torch.from_numpy(array.copy())
        dist.all_reduce(tensor)
        return tensor.numpy()

    def fails(self, rank: int, how: str) -> None:
        """One rank fails, while the others are in an exchange with it."""
        if self.place.rank == rank:
            self._fail(how)
        ones = torch.ones(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(ones)
        # NCCL works in the background. Reading the value waits for it.
        ones.item()

    def _fail(self, how: str) -> None:
        if how == "data":
            raise DataError("rows.jsonl:3: prompt is empty. Remove the row.")
        if how == "value":
            raise ValueError("broken on purpose")
        if how == "kill":
            self.place.doing("micro-batch 1 of 8")
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "abort":
            print("these are its last words")
            os.abort()
        if how == "sleep":
            self.place.doing("micro-batch 5 of 8, forward")
            _stands_still_here()
        raise AssertionError(how)

    def fails_and_ends(self, rank: int) -> None:
        """One rank raises and its process ends at once, while the others are in an exchange with it."""
        if self.place.rank == rank:
            threading.Timer(0.05, os.abort).start()
            self._fail("data")
        dist.all_reduce(torch.ones(1))

    def answers_with_a_lock(self) -> Any:
        return threading.Lock()

    def answers_what_cannot_be_read(self) -> Any:
        return Unreadable()

    def waits(self, how: str) -> None:
        """Wait for ever: in an exchange that only rank 0 joins, for what the other rank never sends, in torch, in code
        that lets no thread run, or in sleep."""
        if how == "exchange" and self.place.rank == 0:
            dist.all_reduce(torch.ones(1))
        if how == "receive":
            dist.recv(torch.ones(1), src=1 - self.place.rank)
        if how == "torch":
            torch.matmul(torch.ones(6000, 6000), torch.ones(6000, 60000))
        if how == "alone":
            re.match(r"(a+)+$", "a" * 60 + "b")
        time.sleep(600)

    def prints(self) -> None:
        print("said by a rank", flush=True)
        print("said by a rank", file=sys.stderr)
        os.system("echo said by a rank")

    def starts_a_process(self) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

    def after(self, seconds: float, value: Any) -> Any:
        time.sleep(seconds)
        return value


class InGroups(Worker):
    """Opens groups in its constructor, as backends do."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.mesh = init_device_mesh("cpu", (place.world, 1))
        self.group = dist.new_group()

    def timeouts_s(self) -> list[float]:
        groups = (dist.group.WORLD, *self.mesh.get_all_groups(), self.group)
        return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


class FailsToStart:
    def __init__(self, place: Place) -> None:
        if place.rank == 1:
            raise DataError("this rank cannot be made")
        dist.barrier()


class StandsStill:
    def __init__(self, place: Place) -> None:
        if place.rank == 1:
            _stands_still_here()


def _stands_still_here() -> None:
    time.sleep(600)
