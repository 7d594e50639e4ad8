"""Print shown data on a terminal: in colours, or with marks that need none.

Without colours ⟦ and ⟧ stand around trained tokens. Whatever the data holds, no control character gets through.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import IO

from rich.console import Console
from rich.text import Text

from spurline.terminal import printable
from spurline_planning.data_preview.rows import ShownData, ShownSequence, ShownToken

_MOST_TOKENS = 1_500
"""Tokens of a sequence that a terminal shows; the middle of a longer one is left out."""
_STYLES = {(True, 0): "bold green", (True, 1): "bold cyan", (False, 0): "default", (False, 1): "bright_black"}
"""Styles by whether a token is trained and whether its number is odd: neighbours differ, so that one sees each."""


def has_colours(file: IO[str]) -> bool:
    """Return whether this output is a terminal that shows colours, and none was asked for (https://no-color.org)."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def print_data(data: ShownData, file: IO[str]) -> None:
    """Write everything to a terminal or a file."""
    if not has_colours(file):
        for line in plain_lines(data):
            print(line, file=file)
        return
    console = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=False)
    for line in data.facts:
        console.print(Text(printable(line)))
    trained = (("trained", _STYLES[True, 0]), " ", ("tokens", _STYLES[True, 1]), ", ") if data.trains_on_it else ()
    context = (("context", _STYLES[False, 0]), " ", ("tokens", _STYLES[False, 1]))
    console.print(Text.assemble(*trained, *context, ", special tokens ", ("underlined", "underline")))
    for row in data.rows:
        console.print()
        console.print(Text(printable(row.heading), "bold"))
        for sequence in row.sequences:
            for line in _headings(sequence):
                console.print(Text(line, "yellow"))
            console.print(_coloured(sequence))


def _coloured(sequence: ShownSequence) -> Text:
    text = Text()
    for number, token in _shortened(sequence.tokens):
        if token is None:
            text.append(f" [... {number:,} tokens ...] ", "yellow")
            continue
        style = _STYLES[token.is_trained, number % 2]
        text.append(_visible(token.text), f"{style} underline" if token.is_special else style)
    return text


def plain_lines(data: ShownData) -> Iterator[str]:
    """Yield the lines of the same without colours."""
    yield from map(printable, data.facts)
    if data.trains_on_it:
        yield "trained tokens are in ⟦ ⟧"
    for row in data.rows:
        yield ""
        yield printable(row.heading)
        for sequence in row.sequences:
            yield from (f"  {line}" for line in _headings(sequence))
            yield from (f"  | {line}" for line in marked(sequence.tokens).splitlines())


def marked(tokens: Sequence[ShownToken], most: int = _MOST_TOKENS) -> str:
    """Return the text of at most so many tokens, with ⟦ ⟧ around those that are trained."""
    parts: list[str] = []
    for is_trained, run in groupby(_shortened(tokens, most), key=lambda item: item[1] and item[1].is_trained):
        for_run = [f" [... {number:,} tokens ...] " if token is None else _unmarked(token) for number, token in run]
        parts.append(f"⟦{''.join(for_run)}⟧" if is_trained else "".join(for_run))
    return "".join(parts)


def _unmarked(token: ShownToken) -> str:
    """Return the token's text, which cannot look like the marks around trained ones."""
    return _visible(token.text).replace("⟦", r"\u27e6").replace("⟧", r"\u27e7")


def _shortened(tokens: Sequence[ShownToken], most: int = _MOST_TOKENS) -> Iterable[tuple[int, ShownToken | None]]:
    """Return tokens with their numbers; (how many, None) in place of those in the middle of too many."""
    numbered = list(enumerate(tokens))
    if len(numbered) <= most:
        return numbered
    half = most // 2
    return [*numbered[:half], (len(numbered) - 2 * half, None), *numbered[-half:]]


def _visible(text: str) -> str:
    return printable(text).replace("\t", "→\t")


def _headings(sequence: ShownSequence) -> list[str]:
    return [printable(line) for line in (f"-- {sequence.heading}", *(f"   {note}" for note in sequence.notes))]
