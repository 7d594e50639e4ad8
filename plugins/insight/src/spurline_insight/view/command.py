"""The command `spurline view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def view(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or going on.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen on 127.0.0.1; 0 for a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, and open no browser.")] = False,
) -> None:
    """Serve a local page over runs: curves, evaluations, rollouts token by token. Ends at Ctrl-C; writes nothing."""
    from spurline_insight.view.server import serve

    serve(run_dirs, port, opens_browser=not no_open, say=typer.echo)
