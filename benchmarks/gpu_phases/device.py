"""Say what this machine is and has, and measure the ceilings of its device.

Figures are printed twice: what is installed, before anything touches the device, and all of them at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "spurline",
    "liger-kernel",
    "flash-attn",
    "flash-attn-3",
    "torchao",
    "peft",
    "bitsandbytes",
    "megatron-core",
    "vllm",
    "trl",
    "datasets",
    "pyarrow",
    "numba",
    "pytest",
)


def commit() -> str:
    """Return the commit of this checkout, or the one that a bundle was made from."""
    with suppress(OSError):
        return (ROOT / "commit.txt").read_text(encoding="ascii").strip()
    with suppress(OSError, subprocess.CalledProcessError):
        command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return "unknown"


def installed() -> dict[str, Any]:
    """Return what can be said without touching the device."""
    versions: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions,
        "missing": [name for name in LIBRARIES if name not in versions],
        "nvidia_smi": nvidia_smi(),
    }


def nvidia_smi() -> str:
    """Return name, driver, memory and clocks of each GPU as the driver's tool says them, or why it does not."""
    asked = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,power.limit"
    try:
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout or done.stderr).strip()


def device_facts(device: str) -> dict[str, Any]:
    """Return the device's name, memory and abilities as torch says them."""
    import torch

    if device == "cpu":
        return {"device": f"CPU ({platform.machine()})", "threads": torch.get_num_threads()}
    free, total = torch.cuda.mem_get_info()
    return {
        "device": torch.cuda.get_device_name(),
        "gpus": torch.cuda.device_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "cuda": torch.version.cuda,
        "free_gib": free / 2**30,
        "total_gib": total / 2**30,
    }


def ceilings(device: str, tiny: bool) -> dict[str, float]:
    """Return GB/s of a copy on the device (bytes read and written) and from the host, and TFLOP/s of a bf16 product."""
    import torch

    source = torch.randint(0, 255, ((1 << 24) if tiny else (2 << 30),), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = seconds_of(lambda: target.copy_(source), device)
    found = {"copy_gb_per_s": 2 * source.numel() / copy_s / 1e9}
    if device == "cuda":
        host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        place = target[: host.numel()]
        found["host_to_device_gb_per_s"] = (
            host.numel() / seconds_of(lambda: place.copy_(host, non_blocking=True), device) / 1e9
        )
        found["device_to_host_gb_per_s"] = (
            host.numel() / seconds_of(lambda: host.copy_(place, non_blocking=True), device) / 1e9
        )
    size = 256 if tiny else 8192
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    found["matmul_tflops"] = 2 * size**3 / seconds_of(lambda: one @ other, device) / 1e12
    return found


def seconds_of(call: Callable[[], object], device: str, repeats: int = 10) -> float:
    """Return the mean seconds of calls in a row, after three that do not count."""
    from gpu_sft import synchronize

    for _ in range(3):
        call()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - began) / repeats


def what_is_on(device: str) -> dict[str, Any]:
    """Take one step of a tiny model with the default settings and bf16, and say what computed it."""
    import torch
    from gpu_sft import job_of, spurline

    from spurline_models.local.configs import LocalBackendConfig
    from spurline_models.streams import segment_attention

    defaults = LocalBackendConfig()
    with tempfile.TemporaryDirectory() as folder:
        trainer = spurline(job_of("tiny", device, 1), Path(folder), {})
        trainer.step()
        with torch.profiler.profile() as profile:
            trainer.step()
    operators = {event.key for event in profile.key_averages()}
    parts = ("varlen", "flash", "scaled_dot_product", "liger", "fused")
    return {
        "defaults": {name: getattr(defaults, name, None) for name in ("precision", "weights", "kernels", "compile")},
        "facts": trainer.about["facts"],
        "varlen_attention_found": segment_attention.varlen_attn is not None,
        "varlen_attention_ran": any("varlen" in name for name in operators),
        "flash_attention_3": find_spec("flash_attn_interface") is not None,
        "attention_operators": sorted(name for name in operators if any(part in name.lower() for part in parts)),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    found = installed()
    print(json.dumps(found), flush=True)
    found |= device_facts(given.device)
    print(json.dumps(found), flush=True)
    found |= ceilings(given.device, given.tiny)
    print(json.dumps(found), flush=True)
    found |= what_is_on(given.device)
    print(json.dumps(found), flush=True)
    if given.device == "cuda" and not found["varlen_attention_ran"]:
        sys.exit(
            "Attention for segments did not run by torch's varlen kernel: packed training is slower than it could."
        )
