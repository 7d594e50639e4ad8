"""The command `spurline generate`, which imports torch when it runs, and its option `--column`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Annotated, Any

import typer

from spurline.cli_options import load_run
from spurline.errors import UserError
from spurline.importing import importing
from spurline.terminal import printable

ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="NAME=COLUMN",
        help="Read NAME (`prompt`, `messages`, ...) from the data's COLUMN. May be given several times.",
    ),
]


def columns_of(given: list[str] | None) -> dict[str, str]:
    """Convert `--column` options to the dataset setting `columns`."""
    columns = {item.partition("=")[0]: item.partition("=")[2] for item in given or ()}
    if not all(name and column for name, column in columns.items()):
        raise UserError("--column takes NAME=COLUMN, with the expected name first, such as --column prompt=question.")
    return columns


def generate(
    target: Annotated[str, typer.Argument(help="Folder of a run, or of a model, or a model's name on the hub.")],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="If none is given: a chat in a terminal, or else standard input."),
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="DATA", help="Rows of prompts, in any form that `data.train` takes.")
    ] = None,
    column: ColumnOption = None,
    checkpoint: Annotated[str, typer.Option(help="The checkpoint of a run: latest, best, or a path.")] = "latest",
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue plain text, without a chat template.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Token limit of an answer.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", min=0, help="0 means no sampling.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P", min=0, max=1)] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K", min=0)] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Text that ends an answer.")] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="Answers to each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The seed of sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object for each answer.")] = False,
) -> None:
    """Answer prompts with a run's checkpoint or a model. Sampling defaults come from the run or the model."""
    from spurline.trackers.start_lines import StartLines

    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    chosen: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    if stop:
        chosen["stop"] = tuple(filter(None, stop))
    if column and file is None:
        raise UserError("--column names columns of --file. Give --file as well.")
    columns = columns_of(column)
    start = StartLines(quiet=as_json)
    start("loading PyTorch and transformers")
    with importing():
        from spurline_models.answering import answers

    # Open the rows first, so that the user sees their errors before the weights are loaded, which takes long.
    rows = None if file is None else answers.prompt_rows(file, columns)
    found = answers.opened(target, load_run, checkpoint, start)
    sampling = replace(found.sampling, **chosen)
    asked = answers.Prompts(found, system, raw=raw)
    typer.echo(printable(f"{found.words}: {sampling.words()}"), err=True)
    # Python has no standard input if the caller has closed it, as cron may.
    is_closed = sys.stdin is None  # pyright: ignore[reportUnnecessaryComparison]
    if not prompts and rows is None and not is_closed and sys.stdin.isatty():
        if as_json or raw or count > 1:
            raise UserError("a conversation in the terminal has no --json, --raw or -n. Give a prompt, or --file.")
        answers.talk(found, asked, sampling, seed)
        return
    given = prompts or (["-"] if rows is None else [])
    if "-" in given and is_closed:
        raise UserError("standard input is closed. Give a prompt, or --file.")
    texts = [sys.stdin.read().rstrip("\n") if text == "-" else text for text in given]
    every = [(text, asked.of_text(text)) for text in texts]
    if rows is not None:
        every += asked.of_rows(rows)
    answers.answer_all(found, every, sampling, count=count, seed=seed, as_json=as_json)
