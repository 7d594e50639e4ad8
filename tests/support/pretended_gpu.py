"""Pretend that this process has one Hopper GPU, and note who asks for it.

`has_triton` asks for the GPU as torchao does while transformers imports it.
"""

from __future__ import annotations

import os
import traceback
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._triton import has_triton

from spurline_ranks.group import Place

asked: list[tuple[str, str]] = []
"""The file that asked for the GPU, and CUDA_VISIBLE_DEVICES at that time."""


def _ask(*arguments: Any) -> None:
    files = [frame.filename for frame in reversed(traceback.extract_stack())]
    # The library that called torch.
    library = next(file for file in files if file != __file__ and "/torch/" not in file and "importlib" not in file)
    asked.append((library, os.environ.get("CUDA_VISIBLE_DEVICES", "")))


def _answer(value: Any) -> Any:
    return lambda *arguments: (_ask(), value)[1]


def pretend() -> None:
    hopper = SimpleNamespace(major=9, minor=0, name="H200", total_memory=141 << 30, multi_processor_count=132)
    torch.cuda._lazy_init = _ask
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = _answer(0)
    torch.cuda.get_device_properties = _answer(hopper)
    torch.cuda.get_device_capability = _answer((9, 0))
    torch.cuda.get_device_name = _answer(hopper.name)
    # Libraries look this up while they are imported, and torch's build for CPUs does not have it.
    torch._C._cuda_getCurrentRawStream = _answer(0)


def _join_over_gloo(backend: str, *, device_id: torch.device, timeout: timedelta, **options: Any) -> None:
    _join("gloo", timeout=timeout, **options)


class Worker:
    def __init__(self, place: Place) -> None:
        self._rank = place.rank

    def asked(self) -> list[str]:
        """Return CUDA_VISIBLE_DEVICES at each time at which the GPU was asked for."""
        return [gpus for _, gpus in asked]


_join = dist.init_process_group
if __name__ != "__main__" and os.environ.get("CUDA_VISIBLE_DEVICES"):
    # This is a rank, which imports this module as that of its worker.
    pretend()
    dist.init_process_group = _join_over_gloo
    has_triton()
