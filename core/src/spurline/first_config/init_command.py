"""The command `spurline init`: its options, and the plan of what it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from spurline.cli_options import importing_libraries
from spurline.errors import UserError, suggestion
from spurline.run.commands import plan


def init(
    file: Annotated[Path, typer.Argument(help="Where to write the config.")] = Path("run.yaml"),
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Folder of a model, or its name on the hub.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Training rows: a file, a folder, a hub name.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="sft|dpo|rl", help="What to train; otherwise the rows decide.")
    ] = None,
    held_out: Annotated[str | None, typer.Option("--eval", metavar="DATA", help="Held-out rows.")] = None,
    reward: Annotated[str | None, typer.Option(metavar="REWARD", help="For rl: a name, or file.py:function.")] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--no-lora", help="Train adapters, or all weights.")] = None,
    epochs: Annotated[float | None, typer.Option(metavar="N", help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take what is usual.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    no_plan: Annotated[bool, typer.Option("--no-plan", help="Do not plan the run that was written.")] = False,
) -> None:
    """Write a commented config for a model and data, and plan it. Asks for what is not given."""
    if task not in (None, "sft", "dpo", "rl"):
        raise UserError(f"--task {task}: is none of sft, dpo, rl.{suggestion(str(task), ['sft', 'dpo', 'rl'])}")
    from spurline.trackers.start_lines import StartLines

    start = StartLines(quiet=False)
    start("loading PyTorch and transformers")
    with importing_libraries():
        from spurline.first_config.command import Wishes, write_first_config

    wishes = Wishes(model, data, cast(Any, task), held_out, reward, lora, epochs, steps)
    for line in write_first_config(file, wishes, start, force=force, may_ask=not yes):
        typer.echo(line)
    typer.echo(f"Wrote {file}.")
    if not no_plan:
        plan(file)
