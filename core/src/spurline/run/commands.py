"""The command that trains a run.

torch is imported inside the command, after what can be said without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from spurline.cli_options import ConfigArgument, SetOption, load
from spurline.errors import ConfigError
from spurline.importing import importing
from spurline.terminal import printable

if TYPE_CHECKING:
    from spurline.run.endings.ending import RunResult


def train(
    config: ConfigArgument,
    overrides: SetOption = None,
    resume: Annotated[str, typer.Option(help="auto, never, or the path of a checkpoint folder.")] = "auto",
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Let a resume change this setting, e.g. optimizer.learning_rate."),
    ] = None,
) -> None:
    """Train, or continue training, what the config describes."""
    loaded = load(config, overrides)
    from spurline.trackers.start_lines import StartLines, banner

    start = StartLines.of(loaded)
    start.show(banner(loaded))
    start("loading PyTorch and transformers")
    with importing():
        from spurline.run.run import Run

        for kind in ("source", "loss", "backend"):
            loaded.host.registry.factory(kind, getattr(loaded.config, kind))

    try:
        result = Run(loaded, resume, allow_change or (), start).train()
    except ConfigError as error:
        raise error.in_file(loaded.origin) from error
    print_result(result)
    # A signal that came when all was trained has stopped nothing.
    if result.signal is not None and result.status == "stopped":
        raise typer.Exit(128 + result.signal)


def print_result(result: RunResult) -> None:
    """Print how a run ended, its scores, and what it wrote."""
    if result.status == "finished" and not result.metrics:
        early = f" early: {result.stop_reason}" if result.stop_reason else ""
        fix = "Change or remove stop_when" if early else "Raise steps or epochs"
        where = f"{printable(early)} at step {result.step:,}"
        typer.echo(f"Nothing to do: the run already finished{where}. {fix} to go on.")
    else:
        finished = "Finished early" if result.stop_reason else "Finished"
        verb = finished if result.status == "finished" else "Stopped on request"
        why = f": {result.stop_reason}" if result.stop_reason else ""
        typer.echo(f"{verb} at step {result.step:,}{printable(why)}{', with warnings:' if result.warnings else '.'}")
        for warning in result.warnings:
            typer.echo(printable(f"  - {warning}"))
    from spurline.trackers.readout import scores_of

    scores = scores_of(result.metrics)
    if scores:
        typer.echo(
            "  held-out: " + ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in scores.items())
        )
    if result.best is not None:
        best = "  best: {metric} {value:.4g} at step {step:,}".format_map(result.best)
        if result.model is not None and result.best["step"] != result.step:
            best += f", not in the model below: spurline export {result.model.parent} OUT --checkpoint best"
        typer.echo(best)
    written = {"checkpoint": result.checkpoint, "model": result.model, "adapter": result.adapter, **result.files}
    for name, path in written.items():
        if path is not None:
            typer.echo(f"  {name}: {path}")
    if result.status == "stopped":
        typer.echo(result.go_on)
