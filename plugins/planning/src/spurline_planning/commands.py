"""The commands `spurline plan`, `spurline data` and `spurline doctor`, which look at a run before it trains.

The commands import torch only after the config is loaded, since the import takes seconds.
"""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from spurline.cli_options import ConfigArgument, SetOption, load
from spurline.errors import ConfigError
from spurline.importing import importing
from spurline.terminal import printable

if TYPE_CHECKING:
    from spurline.trackers.start_lines import StartLines
    from spurline_models.machine import Finding


def plan(
    config: ConfigArgument,
    overrides: SetOption = None,
    gpu_gib: Annotated[
        float | None, typer.Option(metavar="GIB", min=1, help="Memory of one GPU, for a run on another machine.")
    ] = None,
) -> None:
    """Check config, data and memory, and print what training would do. Exit code 2 on any problem."""
    loaded = load(config, overrides)
    start = start_lines()
    with importing():
        from spurline_planning.plan import make_plan

    made = make_plan(loaded, progress=start, device_bytes=None if gpu_gib is None else int(gpu_gib * 2**30))
    for heading, lines in made.sections.items():
        typer.echo(f"{heading}:")
        for line in lines:
            typer.echo(printable(f"  {line}"))
    for problem in made.problems:
        typer.echo(printable(f"Error: {problem}"), err=True)
    if made.problems:
        raise typer.Exit(2)
    sets = "".join(f" --set {shlex.quote(override)}" for override in overrides or ())
    typer.echo(f"No problems found. Train with: spurline train {shlex.quote(str(config))}{sets}")


def data(
    config: ConfigArgument,
    overrides: SetOption = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="Number of samples or prompts to show.")] = 3,
    whole: Annotated[bool, typer.Option("--whole", help="Read all rows of large data, as training does.")] = False,
) -> None:
    """Show the first rows of a run: every token, whether it is trained, and what was cut or left out."""
    loaded = load(config, overrides)
    start = start_lines()
    with importing():
        from spurline_planning.data_preview.rows import ROW_LIMIT, show_data
        from spurline_planning.data_preview.terminal import print_data

    try:
        shown = show_data(loaded, rows, None if whole else ROW_LIMIT, start)
    except ConfigError as error:
        raise error.in_file(loaded.origin) from error
    print_data(shown, sys.stdout)


def diagnose_run(
    config: ConfigArgument,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Check machine, folders, devices and ranks before a run. Exit code 2 on any problem."""
    loaded = load(config, overrides)
    start_lines()
    with importing():
        from spurline_planning.doctor import find

    findings: list[Finding] = []
    for finding in find(loaded):
        findings.append(finding)
        if not as_json:
            typer.echo(f"{'problem' if finding.fix else 'ok':8} {finding.what}: {finding.value}")
            if finding.fix:
                typer.echo(f"{'':8} fix: {finding.fix}")
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.fix for finding in findings):
        raise typer.Exit(2)


def start_lines() -> StartLines:
    """Print that imports have begun. Call the returned object to print each further step."""
    from spurline.trackers.start_lines import StartLines

    start = StartLines()
    start("loading PyTorch and transformers")
    return start
