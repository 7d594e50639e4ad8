"""Keep a Ray cluster of this machine alone to those who started it.

A process that can talk to a Ray cluster can run code in it. By itself Ray listens on all interfaces, and shares one
token among all clusters of a user, in a file that others of the machine may be able to read.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from ray import _raylet
from ray._private import ray_constants

from spurline.errors import RunFailedError
from spurline_text.own_folder import OwnFolder

_COMPILED: Any = _raylet

_OWN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

_STRANGER = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
_STRANGER_LIMIT_S = 60.0
_PREFIX = "spurl-ray-"
_LONGEST_BASE = 107 - len(f"/{_PREFIX}12345678/r/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Bytes of the path of a folder in which Ray's can be: that of a socket has 107 at most."""
_SHORT_BASE = "/tmp"


@contextmanager
def starting_for_us_alone() -> Iterator[None]:
    """Let a cluster that is started in the context listen on the loopback, and answer only with a token made for it.

    This process and those that the cluster starts have the token; it is in no file.
    """
    before = {name: os.environ.pop(name, None) for name in _OWN_VARIABLES}
    everywhere = ray_constants.ENABLE_RAY_CLUSTER
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # It would tell its makers of the machine, unless the user wants that.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # What Ray does by itself on systems where a cluster is one machine; an address of the loopback that it is given it
    # replaces by one that others reach.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        read_authentication()
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = everywhere
        # Programs that this process starts have no use for the token.
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def folder_of_ours() -> Iterator[str]:
    """Make a folder for such a cluster's sockets, logs and copies of code, which no other user may enter.

    Ray lets all users of a machine write to its folders, where they could put other code. It is removed afterwards, or
    with the next one where this process is killed.
    """
    base = os.environ.get("RAY_TMPDIR") or gettempdir()
    if len(os.fsencode(base)) > _LONGEST_BASE:
        base = _SHORT_BASE
    os.makedirs(base, exist_ok=True)
    closed = OwnFolder(_PREFIX, Path(base))
    try:
        yield str(closed.path / "r")
    finally:
        closed.remove()


def read_authentication() -> None:
    """Let Ray read again from the environment how this process proves who it is.

    It does so once by itself, and could join no cluster with another token, or with none, after that.
    """
    _COMPILED.Config.initialize("")
    # Older releases of Ray have no tokens, and their own cluster is protected by where it listens alone.
    if hasattr(_COMPILED, "AuthenticationTokenLoader"):
        _COMPILED.AuthenticationTokenLoader.instance().reset_cache()


def obeys_strangers(address: str) -> bool:
    """Return whether the head of a running cluster answers a process that has no token.

    Raises:
        RunFailedError: If it cannot be asked.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _OWN_VARIABLES}
    command = [sys.executable, "-c", _STRANGER, address]
    try:
        asked = subprocess.run(
            command,
            env={**environment, "RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=_STRANGER_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunFailedError(f"The Ray cluster at {address} did not answer within {_STRANGER_LIMIT_S:g} s.") from None
    if asked.returncode and "AuthenticationError" not in asked.stderr:
        raise RunFailedError(f"The Ray cluster at {address} could not be asked: {asked.stderr[-300:].strip()}")
    return asked.returncode == 0
