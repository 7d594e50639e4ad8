"""Split strings such as `train`, `train[:100]`, `train[10%:20%]` or `train[:50]+test`.

In: the string and a way to open a split by its plain name. Out: which rows of which split, in order. The grammar and
the rounding are those of Hugging Face `datasets`, for local files as for hub names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sized
from typing import TypeVar

from datasets import ReadInstruction

from spurline.errors import DataError

_NAME = re.compile(r"\w+(?:[.\-]\w+)*")

RowsT = TypeVar("RowsT", bound=Sized)


def resolve_split(spec: str, open_split: Callable[[str], RowsT], origin: str) -> list[tuple[RowsT, range]]:
    """The rows of each part of `spec`. Raises DataError naming `origin` when the string cannot be read."""
    try:
        instruction = ReadInstruction.from_spec(spec.strip())
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{origin}: split {spec!r} cannot be read: {error} Write it like train, train[:1000] or train[10%:20%]."
        ) from error
    names = dict.fromkeys(_split_name(part) for part in spec.split("+"))
    opened = {name: open_split(name) for name in names}
    parts = instruction.to_absolute({name: len(rows) for name, rows in opened.items()})
    return [(opened[part.splitname], range(part.from_, part.to)) for part in parts]


def _split_name(part: str) -> str:
    match = _NAME.match(part.strip())
    assert match is not None, f"{part!r} was accepted as a split but has no name"
    return match.group()
