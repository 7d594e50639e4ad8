"""The option `--column` of commands that read rows: columns under other names than usual."""

from __future__ import annotations

from typing import Annotated

import typer

from spurline.errors import UserError

ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="NAME=COLUMN",
        help="Which column of the data is `prompt`, `messages`, ...; may be given again.",
    ),
]


def columns_of(given: list[str] | None) -> dict[str, str]:
    """Return the setting `columns` of a dataset from `--column` options."""
    columns = {item.partition("=")[0]: item.partition("=")[2] for item in given or ()}
    if not all(name and column for name, column in columns.items()):
        raise UserError("--column is NAME=COLUMN, such as --column prompt=question: the name that is expected first.")
    return columns
