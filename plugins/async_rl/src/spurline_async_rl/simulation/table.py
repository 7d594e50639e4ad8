"""Print a comparison for people: what it rests on, a row for each choice, and the advice."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from spurline_async_rl.simulation.comparison import Comparison
from spurline_async_rl.simulation.prediction import Prediction

_WIDTH = 120
_HEADINGS = ("", "S", "B", "K", "E", "steps/s", "of possible", "staleness", "by age", "training", "generation")
_BELOW = ("", "", "", "", "", "", "", "mean/max", "0, 1, ...", "waits", "waits")
_TEXT = ("", "by age")


def print_comparison(comparison: Comparison) -> None:
    """Write it to standard output."""
    # Wide enough also where the output is no terminal, whose width would be taken to be 80.
    console = Console(width=_WIDTH, highlight=False, markup=False, soft_wrap=True)
    console.print("Rests on:")
    for line in comparison.workload.basis:
        console.print(f"  {line}")
    table = Table(box=None, header_style="")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in _TEXT else "right", no_wrap=True)
    table.add_row(*_BELOW)
    table.add_row("config", *_cells(comparison.current))
    before = ""
    for name, other in comparison.others:
        table.add_row(f"other {name}" if name != before else "", *_cells(other))
        before = name
    console.print(table, soft_wrap=False)
    console.print("S max_staleness, B prompts_per_step, K max_concurrent_groups, E engines\n")
    for line in comparison.lines:
        console.print(line)


def _cells(prediction: Prediction) -> list[str]:
    knobs, figures = prediction.knobs, prediction.figures
    ages = range(max(figures.staleness, default=0) + 1)
    return [
        str(knobs.max_staleness),
        str(knobs.batch_size),
        str(knobs.max_running),
        str(knobs.engines),
        f"{figures.steps_per_second:.3g}",
        # Chance can make the groups of a window lighter than all groups are.
        f"{min(1.0, prediction.efficiency):.0%}",
        f"{figures.mean_staleness:.2f}/{figures.max_staleness}",
        " ".join(f"{figures.staleness.get(age, 0.0):.0%}" for age in ages),
        f"{figures.trainer_idle:.0%}",
        f"{figures.generation_blocked + figures.generation_paused:.0%}",
    ]
