"""Define the command `spurline step-times RUN_DIR`, which prints the step times of a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from spurline.errors import RunDirectoryError
from spurline_plugin_template.step_times import FILE_NAME

command = typer.Typer()


@command.command()
def show_step_times(run_dir: Annotated[Path, typer.Argument(help="Folder of a finished run.")]) -> None:
    """Print the step-time percentiles of a run."""
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise RunDirectoryError(
            f"{path} does not exist. Train to the end of the run with `plugins: [plugin_template]`."
        )
    measured = json.loads(path.read_text(encoding="utf-8"))
    typer.echo(f"{measured['steps']} steps")
    for share, seconds in measured["percentiles_s"].items():
        typer.echo(f"p{share}: {seconds:.3f} s")
