"""Format rates, durations and quantities for people, in the console tracker and the report."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Smoothed:
    """Exponential moving average over about `span` values, without the start-up bias."""

    def __init__(self, span: float) -> None:
        self._keep = 1 - 2 / (span + 1)
        self._total = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Take in one value and return the new average."""
        self._total = self._keep * self._total + (1 - self._keep) * value
        self._weight = self._keep * self._weight + (1 - self._keep)
        return self._total / self._weight

    @property
    def value(self) -> float | None:
        """Return the average so far, or None before the first value."""
        return self._total / self._weight if self._weight else None


def training_seconds(metrics: Mapping[str, float]) -> float | None:
    """Return the seconds of a step without evaluation and generation, or None if they are unknown."""
    whole = metrics.get("time/step")
    if whole is None or whole <= 0:
        return None
    # Generation may go on while training runs. Only the part within `time/batch` makes the step longer.
    generating = min(metrics.get("time/generate", 0.0), metrics.get("time/batch", 0.0))
    rest = whole - metrics.get("time/evaluate", 0.0) - generating
    return rest if rest > 0 else whole


def seconds_of_generation(metrics: Mapping[str, float]) -> float:
    """Return the seconds in which rollouts were generated, including the time that overlaps training. 0 if unknown."""
    return metrics.get("time/generating", metrics.get("time/generate", 0.0))


def scores_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the scores of a step's evaluations, without the time that they took."""
    return {name: value for name, value in metrics.items() if name.startswith("eval/") and not name.endswith("/time")}


def quantity(value: float) -> str:
    """Format a number with three significant digits and a unit prefix: 950, 12.3k, 1.20M."""
    if not math.isfinite(value):
        return str(value)
    for size, prefix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        # 999,950 would become "1000k" after rounding, so it gets the next prefix.
        if abs(value) >= size * 0.9995:
            scaled = value / size
            digits = max(0, 2 - int(math.log10(max(1.0, abs(scaled) * 1.0005))))
            return f"{scaled:,.{digits}f}{prefix}"
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"


def clock(seconds: float) -> str:
    """Format seconds as H:MM:SS, with days in front if needed."""
    if not math.isfinite(seconds):
        return "unknown"
    days, rest = divmod(round(max(0.0, seconds)), 86_400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days:,}d {text}" if days else text
