"""What is freed among what stays leaves the process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from spurline_models.placement.freed_memory import return_freed_memory

MIB = 2**20


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_tensors_between_kept_ones_are_returned() -> None:
    # Below the size from which the C library maps each tensor on its own.
    freed, kept = [], []
    for _ in range(2000):
        freed.append(torch.ones(16 * 1024))
        kept.append(torch.ones(512))
    before = anonymous_bytes()
    freed.clear()
    return_freed_memory()
    assert before - anonymous_bytes() > 100 * MIB
    assert all(bool((part == 1).all()) for part in kept)
