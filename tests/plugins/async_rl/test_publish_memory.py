"""A publish holds two buckets at most beside the weights, on both sides, by the figures of the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "weight_sync.py"


def measured(folder: Path, *arguments: str) -> dict[str, Any]:
    """What the benchmark prints as JSON."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        # Models are written there.
        "TMPDIR": str(folder),
    }
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", "--repeats", "1", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=True,
        timeout=1500,
    )
    return json.loads(done.stdout)


def check(figures: dict[str, Any]) -> None:
    assert len(figures["gates"]) == 2
    for gate in figures["gates"]:
        assert gate["met"], gate
    for name, cost in figures["transports"].items():
        # Less than half a bucket would mean that nothing was measured.
        assert cost["sender_buckets"] > 0.5, name
        assert cost["bytes_sent"] == figures["gib"] * 2**30, name
    assert figures["transports"]["collective"]["receiver_buckets"] > 0.5


def test_a_broadcast_holds_at_most_two_buckets_on_either_side(tmp_path: Path) -> None:
    # Below 32 MiB the memory allocator would keep what is freed, and a bucket would be as small as a library.
    for _ in range(3):
        figures = measured(tmp_path, "--gib", "0.125", "--bucket-mb", "40", "--only", "collective")
        # The thread that reads the memory may not get its turn on a busy machine, and then has seen nothing.
        if figures["transports"]["collective"]["sender_buckets"] > 0.5:
            break
    check(figures)
