"""The `spurline simulate` command: what would this config give on engines and a trainer of these speeds?

Mounted by entry point; imports the model only inside the command, so that `spurline --help` stays quick.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

import typer

if TYPE_CHECKING:
    from spurline.config.loading import LoadedConfig
    from spurline_async_rl.scheduling.depth import Depth
    from spurline_async_rl.simulation.prediction import Comparison
    from spurline_async_rl.simulation.workload import Knobs
    from spurline_rl.protocols.rollout_engine import RolloutEngineConfig

_GROUPS_SIMULATED = 1500
_FEWEST_STEPS, _MOST_STEPS = 12, 60


def simulate(
    config: Annotated[Path, typer.Argument(help="Run config with source async_rollouts: a YAML or TOML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. source.max_staleness=1."),
    ] = None,
    from_run: Annotated[
        Path | None, typer.Option("--from", metavar="RUN_DIR", help="Earlier run whose measured times are used.")
    ] = None,
    group_seconds: Annotated[
        float | None, typer.Option(min=1e-6, help="Mean time of a group, from its start to its slowest attempt's end.")
    ] = None,
    sigma: Annotated[float, typer.Option(min=0, max=4, help="Spread of group times: sigma of their logarithm.")] = 0.0,
    attempt_sigma: Annotated[
        float | None, typer.Option(min=0, max=4, help="Spread of attempts' lengths; by default that of groups.")
    ] = None,
    stragglers: Annotated[
        str | None,
        typer.Option(metavar="SHARExFACTOR", help="Groups that take longer: 0.01x10 is 1% ten times as long."),
    ] = None,
    saturation: Annotated[
        int | None, typer.Option(min=1, help="Groups that saturate one engine; by default as many as the config runs.")
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(min=1e-6, help="Time of one step beside waiting and publishing.")
    ] = None,
    publish_seconds: Annotated[float | None, typer.Option(min=0, help="Time to publish the weights.")] = None,
    pause_seconds: Annotated[
        float | None, typer.Option(min=0, help="Part of it in which engines stand still; by default all of it.")
    ] = None,
    left_out: Annotated[
        float | None, typer.Option(metavar="SHARE", help="Groups that zero_variance: refill replaces.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Steps to simulate for each choice; by default some 1,500 groups' worth.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Draw timeline and curves.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Predict throughput, staleness and idle time of an asynchronous run, and recommend settings.

    Runs the scheduler of source async_rollouts on a virtual clock. Times come from an earlier run (--from), from the
    options, or from both, where options win.
    """
    from rich.console import Console

    from spurline.config.loading import load_config
    from spurline_async_rl.simulation.measured import measured_workload
    from spurline_async_rl.simulation.prediction import compare
    from spurline_async_rl.simulation.table import print_comparison
    from spurline_async_rl.simulation.workload import given_workload

    draw = None if plot is None else _page_writer()
    loaded = load_config(config, overrides or [])
    source = simulated_source(loaded)
    knobs = knobs_of(source)
    if from_run is not None:
        workload = measured_workload(from_run)
    else:
        workload = given_workload(knobs, group_seconds, step_seconds, loaded.origin)
    workload = workload.with_groups(knobs, group_seconds, sigma, stragglers, saturation)
    if from_run is None or attempt_sigma is not None:
        workload = workload.with_attempts(source.samples_per_prompt, attempt_sigma, sigma)
    workload = workload.with_steps(knobs, step_seconds).with_left_out(left_out)
    if publish_seconds is not None or pause_seconds is not None:
        workload = workload.with_publishes(publish_seconds, pause_seconds)
    elif from_run is None:
        workload = workload.but("publishing weights takes no time")
    num_steps = steps or min(_MOST_STEPS, max(_FEWEST_STEPS, _GROUPS_SIMULATED // knobs.batch_size))
    with Console(stderr=True).status("Simulating ..."):
        comparison = compare(workload, knobs, num_steps)
    if as_json:
        typer.echo(json.dumps(comparison.as_json(), indent=2))
    else:
        print_comparison(comparison)
    if plot is not None and draw is not None:
        typer.echo(f"plots: {draw(plot, comparison, loaded.resolved())}", err=as_json)


def _page_writer() -> Callable[[Path, Comparison, Mapping[str, Any]], Path]:
    """Import `write_page`. Raises UserError where spurline-insight, which draws pages, is not installed."""
    from spurline.errors import UserError

    if find_spec("spurline_insight") is None:
        raise UserError(
            "--plot draws a page like a report, for which spurline-insight is needed, and it is not installed. Install "
            "it with: pip install 'spurline-async-rl[report]'; or leave --plot out."
        )
    from spurline_async_rl.simulation.page import write_page

    return write_page


@runtime_checkable
class GeneratesWhileTraining(Protocol):
    """What the settings of a source say for it to be simulated; see `AsyncRolloutsConfig`."""

    max_staleness: int
    prompts_per_step: int
    samples_per_prompt: int
    groups_at_once: int
    publish_every: int
    order: Literal["fifo", "window"]
    at_bound: Literal["wait", "mask"]
    depth: Depth
    engine: RolloutEngineConfig


def simulated_source(loaded: LoadedConfig) -> GeneratesWhileTraining:
    """Settings of the source. Raises UserError for a run of another one."""
    from spurline.errors import UserError

    source = loaded.config.source
    if not isinstance(source, GeneratesWhileTraining):
        raise UserError(
            f"{loaded.origin}: source.name is {source.name}, but only source async_rollouts can be simulated. Add "
            "async_rl to `plugins` and set source.name: async_rollouts; `--set source.name=async_rollouts` tries it."
        )
    return source


def knobs_of(source: GeneratesWhileTraining) -> Knobs:
    """What the config chooses."""
    from spurline_async_rl.simulation.workload import Knobs

    return Knobs(
        max_staleness=source.max_staleness,
        batch_size=source.prompts_per_step,
        max_running=source.groups_at_once,
        engines=source.engine.num_engines,
        publish_every=source.publish_every,
        order=source.order,
        at_bound=source.at_bound,
        depth=source.depth,
    )
