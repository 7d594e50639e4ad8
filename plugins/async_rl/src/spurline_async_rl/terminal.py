"""Print messages of engines, publishes and proofs while a run trains."""

from __future__ import annotations

import sys

from spurline.terminal import printable


def tell(message: str) -> None:
    """Print a message to stderr. Control characters, as an engine's log may have them, are printed as escapes."""
    print(printable(message), file=sys.stderr, flush=True)
