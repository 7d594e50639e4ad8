"""The file of kept rollouts: gzip members one after another, each all that is kept of one step.

Any program that reads gzip reads the whole file as JSON lines. Each member also says in its header (an extra field of
RFC 1952 named `SP`) which step it holds and how long it is, so that one step is found without unpacking the others, and
a member that a kill has cut short is known to be. Nothing here knows what the lines say. No torch.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from spurline.errors import RunDirectoryError, RunDirectoryLostError
from spurline.files import own_file, regular_file, sync_file, write_failure

ROLLOUTS_FILE = "rollouts.jsonl.gz"
"""Name of the file inside the run directory."""

_HEADER = struct.Struct("<4sIBBH2sHIQ")
"""Magic with flags, time, two bytes that say nothing, length of the extra field, its name and length; step; bytes of
the member."""
_MAGIC = b"\x1f\x8b\x08\x04"
_NAME = b"SP"
_TRAILER = struct.Struct("<II")
_LEVEL = 1
"""Most of a member is numbers that hardly get shorter: higher levels take several times as long for a few percent."""


@dataclass(frozen=True)
class Member:
    """What one step has of the file: bytes [offset, offset + size)."""

    step: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + self.size


def pack(step: int, lines: Iterable[bytes]) -> bytes:
    """The member of a step. lines: with their newlines."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    parts: list[bytes] = []
    check, length = 0, 0
    for line in lines:
        check, length = zlib.crc32(line, check), length + len(line)
        parts.append(packer.compress(line))
    parts += [packer.flush(), _TRAILER.pack(check, length & 0xFFFFFFFF)]
    size = _HEADER.size + sum(map(len, parts))
    header = _HEADER.pack(_MAGIC, 0, 4, 255, 16, _NAME, 12, step, size)
    return b"".join([header, *parts])


def _said_by(header: bytes) -> tuple[int, int] | None:
    """(step, bytes) of the member that begins with these bytes; None where none begins."""
    magic, _, _, _, _, name, _, step, size = _HEADER.unpack(header)
    return (step, size) if magic == _MAGIC and name == _NAME and size > _HEADER.size else None


def members_of(path: Path) -> list[Member]:
    """The complete members in order; one that was cut short at the end is left out, a missing file has none.

    Reads headers alone. Raises RunDirectoryError naming the place where something else than a member begins.
    """
    try:
        with open(path, "rb", opener=regular_file) as file:
            return list(_members(file, path))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}.") from error


def _members(file: BinaryIO, path: Path) -> Iterator[Member]:
    end, offset = os.fstat(file.fileno()).st_size, 0
    while offset + _HEADER.size <= end:
        file.seek(offset)
        said = _said_by(file.read(_HEADER.size))
        if said is None:
            raise RunDirectoryError(
                f"{path}: at byte {offset:,} no rollouts of a step begin. Only the end of this file may be cut off by "
                "a kill; it was changed by something else. Move it away; the run goes on without it."
            )
        step, size = said
        if offset + size > end:
            return
        yield Member(step, offset, size)
        offset += size


def unpack(path: Path, member: Member) -> Iterator[bytes] | None:
    """The lines of a member, without their newlines; None where it lies elsewhere or is gone, as the run has thinned
    the file out since it was found. Raises RunDirectoryError when it is damaged."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            file.seek(member.offset)
            packed = file.read(member.size)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}.") from error
    if len(packed) < member.size or _said_by(packed[: _HEADER.size]) != (member.step, member.size):
        return None
    try:
        content = zlib.decompress(packed, 16 + zlib.MAX_WBITS)
    except zlib.error as error:
        raise RunDirectoryError(f"{path}: the rollouts of step {member.step} are damaged ({error}).") from error
    return iter(content.splitlines())


def cut_back(path: Path, last_step: int) -> None:
    """Keep the members up to the last one whose step is at most `last_step`; a missing file stays missing.

    What comes after them was never forced to the disk, so a power cut may have left anything there. Raises
    RunDirectoryError when something else than a member comes before.
    """
    end, reached = 0, 0
    try:
        with open(path, "r+b", opener=own_file) as file:
            try:
                for member in _members(file, path):
                    if member.step > last_step:
                        break
                    end, reached = member.end, member.step
            except RunDirectoryError:
                if reached < last_step:
                    raise
            file.truncate(end)
            os.fsync(file.fileno())
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_failure(path, error) from error


class MemberFile:
    """The file while a run appends to it.

    most_bytes: when the file gets longer, older steps are thinned out. Until the shorter file has taken the place of
    the longer one, both are there.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._members = members_of(path)
        self._file = self._open()

    def append(self, step: int, packed: bytes) -> None:
        """Add the member of a step; it survives the process from here on.

        Raises RunFailedError when the disk is full, RunDirectoryLostError when somebody removed the file.
        """
        try:
            # One write call: a kill in the middle of it tears this member at most.
            if self._file.write(packed) != len(packed):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            is_lost = os.fstat(self._file.fileno()).st_nlink == 0
        except OSError as error:
            raise write_failure(self._path, error) from error
        if is_lost:
            raise RunDirectoryLostError(f"{self._path} was removed while the run was going on.")
        offset = self._members[-1].end if self._members else 0
        self._members.append(Member(step, offset, len(packed)))
        if self._members[-1].end > self._most_bytes:
            self._thin()

    def flush(self) -> None:
        """Force all members to the disk, where they survive a power cut. Raises RunFailedError when that fails."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise write_failure(self._path, error) from error

    def close(self) -> None:
        """Let go of the file. May be called twice."""
        self._file.close()

    def _open(self) -> FileIO:
        try:
            return open(self._path, "ab", buffering=0, opener=own_file)
        except OSError as error:
            raise write_failure(self._path, error) from error

    def _thin(self) -> None:
        kept = thinned(self._members, self._most_bytes)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        moved: list[Member] = []
        temporary.unlink(missing_ok=True)
        try:
            with self._path.open("rb") as before, temporary.open("xb") as after:
                for member in kept:
                    moved.append(Member(member.step, after.tell(), member.size))
                    before.seek(member.offset)
                    after.write(before.read(member.size))
                after.flush()
                os.fsync(after.fileno())
            temporary.replace(self._path)
            sync_file(self._path.parent)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise write_failure(self._path, error) from error
        self._file.close()
        self._file, self._members = self._open(), moved


def thinned(members: Sequence[Member], most_bytes: int) -> list[Member]:
    """Those to keep when there is too much: the newest steps as they are, of the older ones fewer and fewer.

    The newest that fit in half of `most_bytes` stay, always the last one; of those before it every other one, again
    and again, until they fit in a quarter. So a file that is thinned rarely has to be.
    """
    first, size = len(members) - 1, members[-1].size
    while first > 0 and size + members[first - 1].size <= most_bytes // 2:
        first -= 1
        size += members[first].size
    older, newest = list(members[:first]), members[first:]
    while older and sum(member.size for member in older) > most_bytes // 4:
        older = older[:-1][::2]
    return [*older, *newest]
