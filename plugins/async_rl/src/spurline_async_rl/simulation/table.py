"""What `spurline simulate` prints: where the numbers come from, a table and advice.

Place on the way: Comparison -> standard output.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from spurline_async_rl.simulation.prediction import Comparison, Prediction

_WIDTH = 120
_HEADINGS = ("", "S", "B", "K", "E", "D", "steps/s", "of possible", "staleness", "by age", "training", "generation")
_BELOW = ("", "", "", "", "", "", "", "", "mean/max", "0, 1, ...", "waits", "waits")


def print_comparison(comparison: Comparison) -> None:
    """Write it to standard output."""
    # Wide enough also where the output is no terminal, whose width would be taken to be 80.
    console = Console(width=_WIDTH, highlight=False, markup=False, soft_wrap=True)
    console.print("Rests on:")
    for line in comparison.workload.basis:
        console.print(f"  {line}")
    table = Table(box=None, header_style="")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("", "by age") else "right", no_wrap=True)
    table.add_row(*_BELOW)
    table.add_row("config", *_cells(comparison.current))
    before = ""
    for name, other in comparison.others:
        table.add_row(f"other {name}" if name != before else "", *_cells(other))
        before = name
    console.print(table, soft_wrap=False)
    console.print(
        "S max_staleness, B prompts_per_step, K max_concurrent_groups, E engines, D depth (~: auto, its mean)\n"
    )
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
        f"{'~' if knobs.depth == 'auto' else ''}{figures.depth:.0f}",
        f"{figures.steps_per_second:.3g}",
        # Chance can make the groups of a window lighter than all groups are.
        f"{min(1.0, prediction.efficiency):.0%}",
        f"{figures.mean_staleness:.2f}/{figures.max_staleness}",
        " ".join(f"{figures.staleness.get(age, 0.0):.0%}" for age in ages),
        f"{figures.trainer_idle:.0%}",
        f"{figures.generation_blocked + figures.generation_paused:.0%}",
    ]
