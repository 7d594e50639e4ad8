"""The command `spurline report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spurline.cli_options import load_run
from spurline.errors import UserError


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or still running.")],
    out: Annotated[
        Path | None, typer.Option(help="The file of a comparison. Default: comparison.html in the current folder.")
    ] = None,
) -> None:
    """Write RUN_DIR/report.html, also while the run is going on. For several runs, write a page that compares them."""
    from spurline.run.directory import RunDirectory, check_run_directory
    from spurline_insight.report.page import write_run_report

    if len(run_dirs) > 1:
        from spurline_insight.report.comparison import COMPARISON_FILE, write_comparison

        typer.echo(write_comparison(run_dirs, out or Path(COMPARISON_FILE)))
        return
    if out is not None:
        raise UserError("--out is for a comparison of several runs. The report of one run is RUN_DIR/report.html.")
    check_run_directory(run_dirs[0])
    typer.echo(write_run_report(load_run(run_dirs[0]), RunDirectory(run_dirs[0])))
