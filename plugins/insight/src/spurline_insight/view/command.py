"""The command `spurline view`: listen on 127.0.0.1, print the address, and serve until Ctrl-C."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from spurline.errors import UserError

ADDRESS = "127.0.0.1"


def view(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or still running.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port on 127.0.0.1. 0 chooses a free port.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, but open no browser.")] = False,
) -> None:
    """Serve a local page about runs: curves, evaluations, rollouts token by token. Ctrl-C stops it. Writes no file."""
    try:
        import uvicorn

        from spurline_insight.view.app import make_app
        from spurline_insight.view.guard import Guard
    except ImportError as error:
        raise UserError(f"spurline view needs {error.name}. Run `pip install 'spurline-insight[view]'`.") from error
    from spurline_insight.view.runs import open_runs

    app = make_app(open_runs(run_dirs))
    with _listening(port) as listener:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        guard = Guard(app, token, port)
        config = uvicorn.Config(
            guard,
            # The application does nothing at start or stop. With lifespan on, Ctrl-C would print a traceback.
            lifespan="off",
            ws="none",
            log_level="warning",
            # The log would show the addresses of requests, which may contain the token.
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
        address = f"http://{ADDRESS}:{port}/?token="
        typer.echo(f"{address}{token}")
        typer.echo("Anyone with this address can read these runs, so keep it secret. Press Ctrl-C to stop.")
        if not no_open and _has_display():
            webbrowser.open(f"{address}{guard.one_visit}")
        # Uvicorn ends at Ctrl-C, and then raises KeyboardInterrupt.
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _listening(port: int) -> socket.socket:
    try:
        return socket.create_server((ADDRESS, port))
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise UserError(f"port {port} cannot be used: {reason}. Choose another, or --port 0.") from error


def _has_display() -> bool:
    """Return whether a browser would open a window. A browser in the terminal would hide the printed lines."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
