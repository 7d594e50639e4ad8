"""Identify this machine, and count its GPUs, CPU cores and memory, without importing torch."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from spurline.errors import ConfigError

_GPU_DEVICE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Finding:
    """A line of `spurline doctor`: the subject, the finding, and a fix if the user should change something."""

    what: str
    value: str
    fix: str = ""


def num_gpus() -> int:
    """Return the number of GPUs that this process may use. CUDA_VISIBLE_DEVICES may restrict them."""
    return len(visible_gpus())


@cache
def visible_gpus() -> tuple[str, ...]:
    """Return the names of the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES, in CUDA's order."""
    present = sum(_GPU_DEVICE.fullmatch(entry.name) is not None for entry in Path("/dev").iterdir())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(number) for number in range(present))
    chosen = [name.strip() for name in visible.split(",")]
    # CUDA ends the list at the first entry that is not a device.
    named = next((place for place, name in enumerate(chosen) if name in ("", "-1")), len(chosen))
    return tuple(chosen[: min(named, present)])


def num_cores() -> int:
    """Return how many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the memory of this machine in bytes, or the limit of its container if the limit is smaller."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return installed if text == "max" else min(installed, int(text))


@cache
def this_machine() -> str:
    """Return a name that is equal in two processes only if they run on the same machine in the same container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"


def why_silent(pid: int) -> str:
    """Return the reason why a process shows no stack, as text to print in place of the stack."""
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2][:1]
        if state in "Tt":
            return f"(no stack: process {pid} is stopped, as by SIGSTOP or a debugger)"
    return "(no stack: the process does not answer)"


def check_ray() -> None:
    """Raise ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        fix = "Run `pip install 'spurline-ranks[ray]'`, or set launch: local."
        raise ConfigError.at("backend.launch", f"is ray, which is not installed. {fix}")


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library is glibc.

    glibc keeps the memory of a freed tensor that has at most 32 MiB. It cannot merge two freed blocks if a
    smaller tensor lies between them, so a process that reads a model tensor by tensor would need more and more memory.
    """
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
