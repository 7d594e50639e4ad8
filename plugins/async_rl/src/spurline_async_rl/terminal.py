"""Print messages of engines, publishes and proofs while a run trains."""

from __future__ import annotations

import sys

from spurline.terminal import printable


def tell(message: str) -> None:
    """Print a message to stderr, with control characters as escapes, because an engine's log may contain them."""
    print(printable(message), file=sys.stderr, flush=True)
