"""Write what was measured as tables in Markdown: `table.md` for a reader, `gpu-results.md` for docs/gpu-results.md."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

GIB = 2**30

Results = Sequence[Mapping[str, Any]]
"""Results of phases, as `runner.Result` has them."""


def write_tables(folder: Path, results: Results) -> None:
    """Write both files, each as a whole."""
    parts = [summary(results), device(results), training(results), smoke_runs(results), tests(results), others(results)]
    replace(folder / "table.md", "\n\n".join(part for part in parts if part) + "\n")
    replace(folder / "gpu-results.md", documentation(results))


def replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def table(heading: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell(value) for value in line) + " |" for line in lines)


def cell(value: object) -> str:
    """Return a value as it stands in a table: numbers with three or four digits, text on one line."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return " ".join(str(value).split()).replace("|", "\\|")


def short(error: str, length: int = 160) -> str:
    """Return why a phase failed, and the last line of its output."""
    lines = error.splitlines()
    text = lines[0] if len(lines) < 2 else f"{lines[0]}: {lines[-1]}"
    return text if len(text) <= length else text[: length - 3] + "..."


def of_kind(results: Results, kind: str) -> list[Mapping[str, Any]]:
    return [result for result in results if result["about"].get("kind") == kind]


def figures_of(results: Results, kind: str) -> Mapping[str, Any]:
    return next((result["figures"] for result in of_kind(results, kind)), {})


def summary(results: Results) -> str:
    counts: dict[str, int] = {}
    for result in results:
        counts[result["status"]] = counts.get(result["status"], 0) + 1
    ended = ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = [(r["phase"], r["status"], r["seconds"], short(r["error"]) if r["error"] else "") for r in results]
    return f"# Phases: {ended}\n\n" + table(("phase", "status", "seconds", "why"), rows)


def device(results: Results) -> str:
    figures = figures_of(results, "device")
    if not figures:
        return ""
    rows: list[tuple[str, object]] = []
    for name, value in figures.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{key} {one}" for key, one in value.items())
        elif isinstance(value, list):
            value = ", ".join(map(str, value))
        rows.append((name, value))
    return "# Device\n\n" + table(("", ""), rows)


def training(results: Results) -> str:
    """Return a row for each candidate of each model, beside the strong loop of the same model and run."""
    measured = of_kind(results, "sft")
    if not measured:
        return ""
    ceiling = figures_of(results, "device").get("matmul_tflops")
    strong = {
        key(result): result["figures"]["tokens_per_s"]
        for result in measured
        if result["about"]["candidate"] == "strong loop" and "tokens_per_s" in result["figures"]
    }
    rows: list[tuple[object, ...]] = []
    for result in measured:
        about, figures = result["about"], result["figures"]
        first = (about["model"], about["train"], candidate(result))
        if "tokens_per_s" not in figures:
            rows.append((*first, result["status"], *[None] * 7))
            continue
        reference = strong.get(key(result))
        mfu, speed = figures.get("mfu"), figures["tokens_per_s"]
        peak, planned = figures.get("peak_bytes"), figures.get("planned_bytes")
        rows.append(
            (
                *first,
                speed,
                speed / reference if reference else None,
                f"{mfu:.1%}" if mfu else None,
                gib(peak),
                gib(figures.get("device_bytes")),
                gib(planned),
                planned / peak if planned and peak else None,
                figures.get("start_s"),
            )
        )
    heading = ("model", "trained", "candidate", "tokens/s", "x strong loop", "MFU", "peak GiB", "device GiB")
    heading = (*heading, "planned GiB", "planned / peak", "start s")
    said = f"\n\nA bf16 product of matrices ran at {ceiling:,.0f} TFLOP/s on this device." if ceiling else ""
    return "# Supervised steps\n\n" + table(heading, rows) + said


def key(result: Mapping[str, Any]) -> tuple[str, str]:
    return result["about"]["model"], result["about"]["train"]


def candidate(result: Mapping[str, Any]) -> str:
    """Return the candidate's name, with its attention if that is no kernel for packed sequences."""
    name, attention = result["about"]["candidate"], result["figures"].get("attention")
    return name if attention is None or "flash" in attention else f"{name} ({attention})"


def gib(size: float | None) -> float | None:
    return size / GIB if size else None


def smoke_runs(results: Results) -> str:
    names = ("metric", "first", "last", "step_s")
    rows = [
        (result["phase"], *(result["figures"].get(name) for name in names), result["seconds"], result["status"])
        for result in of_kind(results, "smoke")
    ]
    return "# Runs of `spurline train`\n\n" + table(("run", *names, "seconds", "status"), rows) if rows else ""


def tests(results: Results) -> str:
    names = ("passed", "failed", "skipped", "left")
    found = of_kind(results, "tests")
    if not found:
        return ""
    rows = [(r["phase"], *(r["figures"].get(name) for name in names), r["status"]) for r in found]
    failures = [
        f"- `{name}`: {' '.join(error.split())[:300]}"
        for result in found
        for name, error in result["figures"].get("failures", {}).items()
    ]
    skipped: dict[str, int] = {}
    for result in found:
        for reason, count in result["figures"].get("why_skipped", {}).items():
            skipped[reason] = skipped.get(reason, 0) + count
    lines = [f"- {count} skipped: {' '.join(reason.split())}" for reason, count in skipped.items()]
    return "# tests/gpu\n\n" + table(("part", *names, "status"), rows) + "\n\n" + "\n".join([*failures, *lines])


def others(results: Results) -> str:
    """Return the figures of all other phases, a row for each figure."""
    rows: list[tuple[object, ...]] = []
    for result in results:
        if result["about"].get("kind") in ("device", "sft", "smoke", "tests"):
            continue
        for name, value in flat(result["figures"]):
            rows.append((result["phase"], name, value))
    return "# Generation, weights and profiles\n\n" + table(("phase", "figure", "value"), rows) if rows else ""


def flat(figures: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}: ")
        elif isinstance(value, list):
            yield f"{prefix}{name}", "; ".join(map(str, value))
        else:
            yield f"{prefix}{name}", value


def documentation(results: Results) -> str:
    """Return the lines for the table in docs/gpu-results.md."""
    about = figures_of(results, "device")
    versions = about.get("versions", {})
    software = f"{versions.get('torch', '?')}, CUDA {about.get('cuda') or 'none'}"
    lines: list[str] = []
    for result in of_kind(results, "sft"):
        facts, figures = result["about"], result["figures"]
        if "tokens_per_s" not in figures:
            continue
        peak = figures.get("peak_bytes") or figures.get("device_bytes")
        row = (result["at"][:10], about.get("commit"), about.get("device"), software, f"Qwen3-{facts['model'].upper()}")
        row = (*row, f"{candidate(result)}, {facts['train']}", figures["tokens_per_s"], gib(peak), facts["command"])
        lines.append("| " + " | ".join(map(cell, row)) + " |")
    return "\n".join(lines) + "\n" if lines else "No supervised steps were measured.\n"
