"""Listen on the loopback, print the address, and serve until Ctrl-C."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from spurline.errors import UserError
from spurline_insight.view.runs import open_runs

ADDRESS = "127.0.0.1"
_GRACE_S = 1
"""Seconds that requests may still take when the server ends."""


def serve(run_dirs: Sequence[Path], port: int, *, opens_browser: bool, say: Callable[[str], object]) -> None:
    """Serve the page over these runs until Ctrl-C or SIGTERM.

    Args:
        run_dirs: Folders of runs.
        port: The port to listen on; 0 takes a free one.
        opens_browser: Whether to open a browser where there is a display.
        say: Called with each line for people.

    Raises:
        UserError: A library is missing, the port is taken, or a folder is no run directory.
    """
    try:
        import uvicorn

        from spurline_insight.view.app import make_app
        from spurline_insight.view.guard import Guard
    except ImportError as error:
        raise UserError(f"spurline view needs {error.name}. Run `pip install 'spurline-insight[view]'`.") from error
    app = make_app(open_runs(run_dirs))
    with _listening(port) as listener:
        port = listener.getsockname()[1]
        token = secrets.token_urlsafe(24)
        guard = Guard(app, token, port)
        config = uvicorn.Config(
            guard,
            # The application needs no start or stop, which Ctrl-C would interrupt with a traceback.
            lifespan="off",
            ws="none",
            log_level="warning",
            # Addresses of requests may hold the token.
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
        address = f"http://{ADDRESS}:{port}/?token="
        say(f"{address}{token}")
        say("Anyone with this address can read these runs: keep it to yourself. Ctrl-C ends the page.")
        if opens_browser and _has_display():
            webbrowser.open(f"{address}{guard.one_visit}")
        # Uvicorn ends at a signal, and then raises it again.
        with suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])


def _listening(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((ADDRESS, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(f"port {port} cannot be used: {error.strerror}. Choose another, or --port 0.") from error
    return listener


def _has_display() -> bool:
    """Return whether a browser has a window: one in the terminal would replace the printed lines."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
