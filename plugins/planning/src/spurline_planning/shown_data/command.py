"""The command `spurline data`. torch is imported inside it, after what can be said without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from spurline.cli_options import ConfigArgument, SetOption, load
from spurline.errors import ConfigError
from spurline.importing import importing


def data(
    config: ConfigArgument,
    overrides: SetOption = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="How many samples, or prompts, are shown.")] = 3,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page instead; it shows every token.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Read all of large data, as training does.")] = False,
) -> None:
    """Show the first rows as they will be trained: every token, which are trained, what was cut or left out."""
    loaded = load(config, overrides)
    from spurline.trackers.start_lines import StartLines

    start = StartLines.of(loaded)
    start("loading PyTorch and transformers")
    with importing():
        from spurline_planning.shown_data.page import write_page
        from spurline_planning.shown_data.sequences import ROW_LIMIT, show_data
        from spurline_planning.shown_data.terminal import print_data

    try:
        shown = show_data(loaded, rows, None if whole else ROW_LIMIT, start)
    except ConfigError as error:
        raise error.in_file(loaded.origin) from error
    if html is None:
        print_data(shown, sys.stdout)
    else:
        write_page(shown, html)
        typer.echo(html)
