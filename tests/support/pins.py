"""What packages of this repository pin of each other."""

from __future__ import annotations

from packaging.version import Version


def pin_of(version: str) -> str:
    """`~=X.Y.0` for each release of a minor version, and a pre-release itself, which is not within that."""
    parsed = Version(version)
    return f"~={version}" if parsed.is_prerelease else f"~={parsed.major}.{parsed.minor}.0"
