"""Settings of the backend `fsdp` for tests: so many ranks on CPU, in one layout or another."""

from __future__ import annotations

from typing import Any


def on(ranks: int, **settings: Any) -> dict[str, Any]:
    """A section `backend`; ranks that wait for each other end the test within a minute."""
    limits = {"start_timeout_s": 120, "call_timeout_s": 60, "collective_timeout_s": 60}
    return {"name": "fsdp", "device": "cpu", "ranks": ranks, "num_threads": 1, **limits, **settings}
