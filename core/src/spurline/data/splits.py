"""Split strings such as `train`, `train[:100]`, `train[10%:20%]` or `train[:50]+test`.

In: the string. Out: which rows of which split, in order. The grammar and the rounding are those of Hugging Face
`datasets`, for local files as for hub names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from datasets import ReadInstruction

from spurline.errors import DataError

_NAME = re.compile(r"\w+(?:[.\-]\w+)*")


class Split:
    """A parsed split string. names: the plain splits it takes rows from, each once."""

    def __init__(self, spec: str, origin: str) -> None:
        """Raises DataError naming `origin` when the string cannot be read."""
        try:
            self._instruction = ReadInstruction.from_spec(spec.strip())
        except (ValueError, AssertionError) as error:
            raise DataError(
                f"{origin}: split {spec!r} cannot be read: {error} Write it like train, train[:1000] or train[10%:20%]."
            ) from error
        parts = [part.strip() for part in spec.split("+")]
        self.names = tuple(dict.fromkeys(_split_name(part) for part in parts))
        # What each part takes is known without counting rows when it takes all.
        self.takes_all = len(self.names) == len(parts) and all(part == _split_name(part) for part in parts)

    def resolve(self, sizes: Mapping[str, int]) -> list[tuple[str, range]]:
        """Split name and rows of each part, given the number of rows of each split."""
        return [(part.splitname, range(part.from_, part.to)) for part in self._instruction.to_absolute(dict(sizes))]


def _split_name(part: str) -> str:
    match = _NAME.match(part)
    assert match is not None, f"{part!r} was accepted as a split but has no name"
    return match.group()
