"""Rewards that run away, each in its own way, for tests of the processes that they are called in."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spurline.errors import DataError
from spurline_rl.protocols.reward import Answer

calls = 0


def fingerprint(row: Mapping[str, Any]) -> int:
    """Return a checksum of the values and their types."""
    return zlib.crc32(ascii(sorted(row.items())).encode())


def behaves(answer: Answer) -> Any:
    """Behave as the response says. `row` has what that needs."""
    global calls
    calls += 1
    match answer.response:
        case "spin":
            while True:
                pass
        case "deadlock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "eat memory":
            return len(bytearray(3 << 30))
        case "die":
            os.abort()
        case "leave programs running":
            # Start one in the group of this process, one in another session, and one without a parent.
            programs = [subprocess.Popen(["sleep", "600"], start_new_session=new) for new in (False, True)]
            orphan = subprocess.run(["sh", "-c", "sleep 600 > /dev/null & echo $!"], stdout=subprocess.PIPE, check=True)
            pids = [program.pid for program in programs] + [int(orphan.stdout)]
            Path(answer.row["report"]).write_text(" ".join(map(str, pids)))
            if answer.row.get("dies"):
                os.abort()
            time.sleep(600)
        case "leave orphans":
            for _ in range(3):
                subprocess.run(["sh", "-c", "sleep 0.01 &"], check=True)
            return os.getppid()
        case "shout":
            print("first words")
            print("x" * 3_000_000, file=sys.stderr)
            os.write(1, b"y" * 3_000_000)
            subprocess.run(["sh", "-c", "yes | head -c 3000000"], check=True)
        case "read":
            return float(len(sys.stdin.read()))
        case "row":
            return fingerprint(answer.row)
        case "path":
            return os.environ.get("PYTHONPATH", "")
        case "bad row":
            raise DataError("no unit in this row")
        case "calls":
            return calls
        case "process":
            return os.getpid()
        case "numpy":
            import numpy

            return numpy.float32(0.5)
    return 1.0


async def judges(answer: Answer) -> float:
    """Waits, and blocks the event loop or refuses to be cancelled where the response says so."""
    await asyncio.sleep(0.01)
    match answer.response:
        case "block":
            while True:
                pass
        case "refuse":
            while True:
                try:
                    await asyncio.sleep(600)
                except asyncio.CancelledError:
                    continue
        case "wait":
            await asyncio.sleep(600)
        case "compute":
            # In steps that let the others run.
            end = time.monotonic() + 0.6
            while time.monotonic() < end:
                time.sleep(0.02)
                await asyncio.sleep(0)
        case "exit":
            sys.exit(3)
        case "die":
            os.abort()
        case "process":
            return os.getpid()
    return 1.0
