"""The command `spurline export`, which imports torch when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from spurline.cli_options import RunDirArgument, load_run
from spurline.importing import importing


def export(
    run_dir: RunDirArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write; `from_pretrained` loads it.")],
    checkpoint: Annotated[str, typer.Option(help="latest, best, or the path of a checkpoint folder.")] = "latest",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the LoRA adapter, as a folder for PEFT, without merging it.")
    ] = False,
) -> None:
    """Write a Hugging Face model folder from a run's checkpoint."""
    loaded = load_run(run_dir)
    with importing():
        from spurline_models.export import export_run

    typer.echo(export_run(loaded, out, checkpoint, adapter=adapter))
