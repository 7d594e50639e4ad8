"""Profile supervised steps: which kernels take the time, and for which share of it the GPU waits for work.

The milliseconds of a step are those of steps before the profiler starts. It slows the host down, so the share of
waiting, which is of profiled steps, is more than without it.

The picture is an SVG with a bar for each of the kernels that take most. On a CPU, operators take the place of kernels.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from gpu_sft import WARMUP, candidates, job_of, spurline, synchronize
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

STEPS = 2
TOP = 15
WIDTH, BAR, LABEL = 1000, 24, 560
"""Pixels of the picture: its width, the height of a bar, and the width of the names."""


def measure(candidate: str, device: str, tiny: bool) -> dict[str, Any]:
    """Return the milliseconds of a step by kernel, the share of waiting, and the number of kernels."""
    job = job_of("tiny" if tiny else "0.6b", device, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        trainer = spurline(job, Path(folder), candidates(job)[candidate])
        for _ in range(WARMUP):
            trainer.step()
        synchronize(device)
        began = time.perf_counter()
        for _ in range(STEPS):
            trainer.step()
        synchronize(device)
        step_ms = (time.perf_counter() - began) * 1000 / STEPS
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
        with profile(activities=activities) as found:
            for _ in range(STEPS):
                trainer.step()
            synchronize(device)
        trainer.close()
    kind = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    # Marks such as `Optimizer.step` span kernels, and are none.
    events: Any = [
        event
        for event in found.events() or []
        if event.device_type == kind and not getattr(event, "is_user_annotation", False)
    ]
    times: dict[str, float] = {}
    for event in events:
        # A kernel has no parts. Of an operator only the time outside of its parts counts.
        spent = event.time_range.elapsed_us() if device == "cuda" else event.self_cpu_time_total
        times[event.name] = times.get(event.name, 0.0) + spent / 1000 / STEPS
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    top = dict(sorted(times.items(), key=lambda pair: -pair[1])[:TOP])
    return {
        "candidate": candidate,
        "model": job.model,
        "step_ms": step_ms,
        "waiting_share_under_the_profiler": 1 - busy(spans) / (max(end for _, end in spans) - spans[0][0]),
        "launches_per_step": len(events) // STEPS,
        "top_ms_per_step": {name[:110]: round(spent, 3) for name, spent in top.items()},
        "top_share": sum(top.values()) / sum(times.values()),
    }


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of spans, which are sorted by their beginning."""
    total, reached = 0.0, float("-inf")
    for begin, end in spans:
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def picture(figures: Mapping[str, Any]) -> str:
    """Return the SVG."""
    top = figures["top_ms_per_step"]
    longest = max(top.values())
    title = (
        f"{figures['model']}, {figures['candidate']}: {figures['step_ms']:.1f} ms a step, "
        f"waiting {figures['waiting_share_under_the_profiler']:.1%} under the profiler, "
        f"{figures['launches_per_step']:,} launches"
    )
    height = BAR * (len(top) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="monospace">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="8" y="{BAR - 6}" font-size="14">{escape(title)}</text>',
    ]
    for number, (name, spent) in enumerate(top.items(), 1):
        y, length = number * BAR + 6, max(1.0, (WIDTH - LABEL - 90) * spent / longest)
        shown = name if len(name) <= 78 else name[:75] + "..."
        parts += [
            f'<text x="8" y="{y + 14}" font-size="11">{escape(shown)}</text>',
            f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR - 6}" fill="#4878a8"/>',
            f'<text x="{LABEL + length + 6:.1f}" y="{y + 14}" font-size="11">{spent:.2f} ms</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("candidate")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--picture", type=Path, required=True)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    figures = measure(given.candidate, given.device, given.tiny)
    print(json.dumps(figures), flush=True)
    given.picture.write_text(picture(figures), encoding="utf-8")
