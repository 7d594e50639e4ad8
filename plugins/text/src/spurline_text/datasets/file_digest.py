"""Hash the content of data files, and remember the hash of large ones so that an unchanged file is not read again.

A remembered hash is found by what the file system says about a file (device, inode, size, time of the last change of
content and of status), never by its name alone; a copied, touched or renamed file is simply hashed again.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import xxhash

REMEMBER_FROM_BYTES = 1 << 20
"""Smaller files are hashed in less time than it takes to look a hash up."""

SETTLED_AFTER_NS = 2_000_000_000
"""A file changed more recently than this might change again within one tick of the file system's clock."""

_CHUNK_BYTES = 1 << 22


def digest_of_file(path: Path) -> str:
    """xxh3-128 of the content, as hex digits. Raises OSError when the file cannot be read."""
    before, folder = path.stat(), memory_folder()
    if before.st_size < REMEMBER_FROM_BYTES or folder is None:
        return _read_and_hash(path)
    memory = folder / _identity(before)
    known = _recall(memory)
    if known is not None:
        return known
    begin = time.time_ns()
    digest = _read_and_hash(path)
    settled = begin - max(before.st_mtime_ns, before.st_ctime_ns) > SETTLED_AFTER_NS
    if settled and _identity(path.stat()) == memory.name:
        _remember(memory, digest)
    return digest


def digest_of_files(paths: list[Path]) -> str:
    """One hash for the content of several files, in order."""
    return xxhash.xxh3_128_hexdigest("\0".join(digest_of_file(path) for path in paths).encode())


def memory_folder() -> Path | None:
    """Return the folder `digests` in SPURLINE_CACHE, else in ~/.cache/spurline.

    None for a user without a home directory: then nothing is remembered.
    """
    try:
        return Path(os.environ.get("SPURLINE_CACHE") or "~/.cache/spurline").expanduser() / "digests"
    except RuntimeError:
        return None


def _identity(status: os.stat_result) -> str:
    facts = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return xxhash.xxh3_128_hexdigest(repr(facts).encode())


def _read_and_hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _recall(memory: Path) -> str | None:
    try:
        known = memory.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return None
    # A file that a full disk cut short is no hash.
    return known if len(known) == 32 else None


def _remember(memory: Path, digest: str) -> None:
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=memory.parent)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(digest)
        Path(temporary).replace(memory)
    except OSError:
        # Without a place to remember it (a read-only home, a full disk) the file is hashed again next time.
        return
