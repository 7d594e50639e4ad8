"""What one controller process carries: tokens per second that its event loop can take, and what to do about more.

`spurline plan` compares it with what engines may generate. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from spurline.trackers.jsonl import METRICS_FILE, read_metrics

BUSY_LOOP = 0.9
"""Share of the time that the event loop is busy; above it, engines wait for it."""

_TOKEN_S_HERE = 10e-6
"""CPU seconds of the event loop's thread per token of an engine that this process takes every step of: vLLM on CPU with
256 responses of 143 tokens at a time took 9 to 11 us, all included, and its recorded messages 3.4 to 4.0 us
(`benchmarks/vllm_stream.py`, a core of a busy server)."""
_TOKEN_S_ELSEWHERE = 4e-6
"""The same of an engine in a Ray actor, which sends chunks of 16 tokens: 3.8 us with responses of 256 tokens, 2.1 us
with 1,024. Child processes take less."""
_LAST_STEPS = 20


def carried_tokens_per_s(*, streams_here: bool) -> float:
    """Tokens per second that leave the event loop some time for everything else.

    streams_here: as of `RolloutEngineConfig`.
    """
    return BUSY_LOOP / (_TOKEN_S_HERE if streams_here else _TOKEN_S_ELSEWHERE)


def capacity_notes(run_dir: Path, fastest: float | None, *, streams_here: bool) -> Sequence[str]:
    """A line for `spurline plan` where tokens may come faster than this process takes them, else none.

    run_dir: what a run has measured there counts more than any estimate. fastest: tokens per second that the engines
    generate at most, None where it is not known. streams_here: as of `RolloutEngineConfig`.
    """
    advice = (
        "With engine.placement: ray, engines send chunks of tokens from processes of their own, and it takes about "
        f"{carried_tokens_per_s(streams_here=False):,.0f} tokens/s."
        if streams_here
        else "Divide the work between several runs, or have fewer engines."
    )
    lines = read_metrics(run_dir / METRICS_FILE)[-_LAST_STEPS:]
    measured = [line for line in lines if {"controller/cpu_share", "controller/tokens_per_s"} <= line.keys()]
    if measured:
        share, rate = (
            median(line[f"controller/{name}"] for line in measured) for name in ("cpu_share", "tokens_per_s")
        )
        if share <= BUSY_LOOP:
            return ()
        return [
            f"controller: its event loop was busy for {share:.0%} of the time in the last {len(measured)} steps of "
            f"{run_dir}, with {rate:,.0f} tokens/s: engines wait for it. {advice}"
        ]
    carried = carried_tokens_per_s(streams_here=streams_here)
    if fastest is None or fastest <= carried:
        return ()
    return [
        f"controller: engines generate up to {fastest:,.0f} tokens/s, and one process takes about {carried:,.0f} of "
        f"them per second: look at controller/cpu_share. {advice}"
    ]
