"""What this machine has to compute on, found without loading torch."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

_GPU_DEVICE = re.compile(r"nvidia\d+")


@cache
def num_gpus() -> int:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves to this process, 0 without a driver."""
    present = sum(_GPU_DEVICE.fullmatch(entry.name) is not None for entry in Path("/dev").iterdir())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [name.strip() for name in visible.split(",")]
    # CUDA ends the list at the first entry that is no device.
    named = next((place for place, name in enumerate(chosen) if name in ("", "-1")), len(chosen))
    return min(named, present)


def memory_bytes() -> int:
    """Memory of this machine, or what its container leaves to this process."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return installed if text == "max" else min(installed, int(text))
