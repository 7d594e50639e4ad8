"""The `spurline simulate` command, which predicts throughput and staleness of an asynchronous run.

The simulation is imported only inside the command, because `spurline --help` must be quick.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from spurline.config.loading import LoadedConfig
    from spurline_simulation.prediction import Comparison, Prediction

_GROUPS_SIMULATED = 1500
_FEWEST_STEPS, _MOST_STEPS = 12, 60
_WIDTH = 120
_HEADINGS = ("", "S", "B", "K", "E", "D", "steps/s", "of possible", "staleness", "by age", "training", "generation")
_BELOW = ("", "", "", "", "", "", "", "", "mean/max", "0, 1, ...", "waits", "waits")
_LEGEND = "S max_staleness, B prompts_per_step, K max_concurrent_groups, E engines, D depth (~: mean of depth auto)"


def simulate(
    config: Annotated[Path, typer.Argument(help="Run config with source async_rollouts: a YAML or TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. source.max_staleness=1."),
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Use the measured times of this earlier run.")
    ] = None,
    group_seconds: Annotated[
        float | None, typer.Option(min=1e-6, help="Mean time of a group, until its slowest attempt ends.")
    ] = None,
    sigma: Annotated[float, typer.Option(min=0, max=4, help="Spread of group times, as sigma of a lognormal.")] = 0.0,
    saturation: Annotated[
        int | None,
        typer.Option(min=1, help="Groups that saturate one engine. Default: the groups per engine in the config."),
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(min=1e-6, help="Time of one step without waiting and publishing.")
    ] = None,
    publish_seconds: Annotated[float | None, typer.Option(min=0, help="Time to publish the weights.")] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Steps to simulate for each choice; by default about 1,500 groups.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Predict throughput, staleness and idle time of an asynchronous run, and recommend settings.

    Runs the scheduler of source async_rollouts on a virtual clock. Times come from an earlier run (--from) and from
    the options; options have precedence.
    """
    from spurline.config.loading import load_config

    comparison = _compare(
        load_config(config, overrides or []),
        from_run,
        steps,
        group_s=group_seconds,
        sigma=sigma,
        saturation=saturation,
        step_s=step_seconds,
        publish_s=publish_seconds,
    )
    if as_json:
        typer.echo(json.dumps(asdict(comparison), indent=2))
    else:
        _print(comparison)


def _compare(loaded: LoadedConfig, from_run: Path | None, steps: int | None, **given: Any) -> Comparison:
    from rich.console import Console

    from spurline.errors import UserError
    from spurline_simulation.prediction import compare
    from spurline_simulation.workload import Knobs, measured_workload, workload_of

    source: Any = loaded.config.source
    if not hasattr(source, "max_staleness"):
        raise UserError(
            f"{loaded.origin}: source.name is {source.name}, but only source async_rollouts can be simulated. Add "
            "async_rl to `plugins` and set source.name: async_rollouts; `--set source.name=async_rollouts` tries it."
        )
    knobs = Knobs(
        max_staleness=source.max_staleness,
        batch_size=source.prompts_per_step,
        max_running=source.groups_at_once,
        engines=source.engine.num_engines,
        publish_every=source.publish_every,
        order=source.order,
        depth=source.depth,
        at_bound=source.at_bound,
    )
    measured = None if from_run is None else measured_workload(from_run)
    workload = workload_of(knobs, measured, loaded.origin, **given)
    num_steps = steps or min(_MOST_STEPS, max(_FEWEST_STEPS, _GROUPS_SIMULATED // knobs.batch_size))
    with Console(stderr=True).status("Simulating ..."):
        return compare(workload, knobs, num_steps)


def _print(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    # Without a terminal, rich would assume a width of 80.
    console = Console(width=_WIDTH, highlight=False, markup=False, soft_wrap=True)
    console.print("Based on:")
    for line in comparison.basis:
        console.print(f"  {line}")
    table = Table(box=None, header_style="")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading in ("", "by age") else "right", no_wrap=True)
    table.add_row(*_BELOW)
    table.add_row("config", *_cells(comparison.config))
    for letter, others in comparison.alternatives.items():
        for number, other in enumerate(others):
            table.add_row("" if number else f"other {letter}", *_cells(other))
    console.print(table, soft_wrap=False)
    console.print(f"{_LEGEND}\n")
    for line in comparison.advice:
        console.print(line)


def _cells(prediction: Prediction) -> list[str]:
    knobs, figures = prediction.knobs, prediction.figures
    ages = range(max(figures.staleness, default=0) + 1)
    return [
        *map(str, (knobs.max_staleness, knobs.batch_size, knobs.max_running, knobs.engines)),
        f"{'~' if knobs.depth == 'auto' else ''}{figures.depth:.0f}",
        f"{figures.steps_per_second:.3g}",
        # By chance the simulated groups can be faster than the average group, and the efficiency more than 1.
        f"{min(1.0, prediction.efficiency):.0%}",
        f"{figures.mean_staleness:.2f}/{figures.max_staleness}",
        " ".join(f"{figures.staleness.get(age, 0.0):.0%}" for age in ages),
        f"{figures.trainer_idle:.0%}",
        f"{max(0.0, figures.generation_idle):.0%}",
    ]
