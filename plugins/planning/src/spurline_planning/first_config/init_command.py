"""The command `spurline init` and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from spurline.errors import UserError
from spurline.importing import importing
from spurline_models.answering.generate_command import ColumnOption, columns_of
from spurline_planning.commands import plan, start_lines

_TASKS = ("sft", "dpo", "rl", "async")


def init(
    model: Annotated[str, typer.Option(metavar="MODEL", help="Folder of a model, or its name on the hub.")],
    data: Annotated[str, typer.Option(metavar="DATA", help="Training rows: a file, a folder, a hub name.")],
    file: Annotated[Path, typer.Argument(help="Where to write the config.")] = Path("run.yaml"),
    task: Annotated[
        str | None, typer.Option(metavar="|".join(_TASKS), help="The kind of training. By default, it fits the rows.")
    ] = None,
    column: ColumnOption = None,
    held_out: Annotated[str | None, typer.Option("--eval", metavar="DATA", help="Held-out rows.")] = None,
    reward: Annotated[str | None, typer.Option(metavar="REWARD", help="For rl: a name, or file.py:function.")] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--no-lora", help="Train adapters, or all weights.")] = None,
    epochs: Annotated[float | None, typer.Option(metavar="N", help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    no_plan: Annotated[bool, typer.Option("--no-plan", help="Do not plan the run.")] = False,
) -> None:
    """Write a config with comments for a model and data, and plan the run."""
    if task not in (None, *_TASKS):
        raise UserError(f"--task {task} is not one of {', '.join(_TASKS)}.")
    if epochs is not None and steps is not None:
        raise UserError("--epochs and --steps are both given. Give one.")
    columns = columns_of(column)
    if file.suffix.lower() == ".toml":
        raise UserError(f"{file}: the config is YAML. Give a name that ends in .yaml.")
    if file.exists() and not force:
        raise UserError(f"{file} exists. Give --force to replace it, or another name.")
    start = start_lines()
    with importing():
        from spurline_planning.first_config.command import Options, write_first_config

    options = Options(model, data, cast(Any, task), held_out, reward, lora, epochs, steps, columns)
    for line in write_first_config(file, options, start):
        typer.echo(line)
    typer.echo(f"Wrote {file}.")
    if not no_plan:
        plan(file)
