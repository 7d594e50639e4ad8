"""The commands `spurline fork`, `spurline verify` and `spurline blame`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spurline.cli import print_result
from spurline.cli_options import RunDirArgument, SetOption
from spurline.errors import SpurlineError, UserError
from spurline.files import remove
from spurline.importing import importing
from spurline.terminal import printable

_MOST_CHARACTERS = 200
"""Length of a text in the list of `spurline blame`."""


def fork(
    run: Annotated[str, typer.Argument(metavar="RUN@STEP", help="Folder of a run and a step, `latest` or `best`.")],
    run_dir: Annotated[Path, typer.Option(help="Folder of the new run.")],
    overrides: SetOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Last step of the new run. Default: as the parent.")] = None,
    generate: Annotated[bool, typer.Option("--generate", help="Do not use rollouts that the run has kept.")] = False,
) -> None:
    """Train a new run from a checkpoint of another run, with the same draws and seeds and with changed settings."""
    from spurline.run.directory import RunDirectory, check_run_directory
    from spurline.trackers.start_lines import StartLines, banner

    parent, at, step = run.rpartition("@")
    if not at:
        raise UserError(f"{run}: give a run and a step, such as {run}@latest.")
    check_run_directory(Path(parent))
    with importing():
        from spurline.run.run import Run
        from spurline_lineage.fork import checkpoint_at, make_fork

    last = [] if steps is None else [f"steps={steps}", "epochs=null"]
    changes, checkpoint = [*(overrides or []), *last], checkpoint_at(Path(parent), step)
    is_new = not run_dir.exists()
    try:
        loaded = make_fork(Path(parent), checkpoint, changes, run_dir, recalls=not generate)
        start = StartLines()
        start.show(banner(loaded))
        result = Run(loaded, progress=start).train()
    except SpurlineError:
        # What is refused leaves nothing, so that the corrected command can use the folder.
        if is_new and not RunDirectory(run_dir).metrics.exists():
            remove(run_dir)
        raise
    print_result(result)
    if result.signal is not None and result.status == "stopped":
        raise typer.Exit(128 + result.signal)


def verify(
    run_dir: RunDirArgument,
    step: Annotated[int | None, typer.Option(min=1, help="Last step to recompute. Default: the last one.")] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Checkpoint to begin with, or `start`. Default: the last one before the step."),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Recompute steps of a run with plugins: [lineage], and say whether they are equal. Exit code 1: they are not."""
    with importing():
        from spurline_lineage.verify import verify as verified

    verdict = verified(run_dir, step, start, overrides or [])
    for departure in verdict.departures:
        typer.echo(printable(f"step {departure.step}: {departure.part.replace('_', ' ')}: {departure.words}"))
    if verdict.departures:
        typer.echo(f"Not equal, from step {min(departure.step for departure in verdict.departures)} on.")
        raise typer.Exit(1)
    steps, recorded = verdict.steps, verdict.recorded
    typer.echo(
        f"Equal: steps {steps[0]} to {steps[-1]} were recomputed, and the record of steps {recorded[0]} to "
        f"{recorded[-1]} fits together."
    )
    if verdict.num_weights < len(steps):
        typer.echo(f"Weights were recorded, and compared, after {verdict.num_weights} of the {len(steps)} steps.")


def blame(
    run_dir: RunDirArgument,
    step: Annotated[int, typer.Option(min=1, help="The step to explain.")],
    top: Annotated[int, typer.Option(min=1, help="Number of prompts or samples to show at either end.")] = 5,
    overrides: SetOption = None,
) -> None:
    """Show which prompts or samples moved the weights most in a step, and which ones pulled against it."""
    from spurline.run.directory import check_run_directory

    check_run_directory(run_dir)
    with importing():
        from spurline_lineage.blame import blame_step, write_shares

    shares = blame_step(run_dir, step, overrides or []).shares()
    total = sum(share for share, _ in shares)
    typer.echo(f"step {step}: {len(shares)} groups, whose shares in the update add up to {total:.6f}")
    first, last = shares[:top], shares[max(top, len(shares) - top) :]
    write_shares(run_dir, step, len(shares), [*first, *last])
    for title, shown in (("largest shares", first), ("smallest shares", last)):
        if shown:
            typer.echo(f"{title}:")
        for share, part in shown:
            rewards = f", rewards {' '.join(f'{reward:.3g}' for reward in part.rewards)}" if part.rewards else ""
            typer.echo(printable(f"  {share:+.4f}  {part.uid}  ({part.loss_tokens:,} tokens with loss{rewards})"))
            typer.echo(printable(f"           {_one_line(part.text)}"))


def _one_line(text: str) -> str:
    """Return the beginning of a text and its end, where the answer is."""
    line = " ".join(text.split())
    if len(line) <= _MOST_CHARACTERS:
        return line
    return f"{line[: _MOST_CHARACTERS // 3]} ... {line[-2 * _MOST_CHARACTERS // 3 :]}"
