"""What packages of this repository pin of each other."""

from __future__ import annotations

from packaging.version import Version


def pin_of(version: str) -> str:
    """Return `~=X.Y.0` for a release, and the version itself for a pre-release, which `~=` excludes."""
    parsed = Version(version)
    return f"~={version}" if parsed.is_prerelease else f"~={parsed.major}.{parsed.minor}.0"
