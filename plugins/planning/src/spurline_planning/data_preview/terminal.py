"""Print the first rows of a run on a terminal or into a file.

⟦ and ⟧ enclose trained tokens. On a terminal, neighbouring tokens have different colours. Control characters in the
data are printed as escapes.
"""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.text import Text

from spurline.terminal import printable
from spurline_planning.data_preview.rows import ShownData, ShownSequence

_MOST_TOKENS = 1_500
"""Maximum number of tokens to show of a sequence. The middle of a longer sequence is left out."""
_STYLES = {(True, 0): "bold green", (True, 1): "bold cyan", (False, 0): "default", (False, 1): "bright_black"}
"""Styles by (whether the token is trained, the token's number modulo 2)."""


def print_data(data: ShownData, file: IO[str]) -> None:
    """Print the rows. Colours are left out in a file, or if `NO_COLOR` is set."""
    console = Console(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)
    for fact in data.facts:
        console.print(printable(fact))
    if any(sequence.kind != "prompt" for row in data.rows for sequence in row.sequences):
        console.print("trained tokens are in ⟦ ⟧")
    for row in data.rows:
        console.print()
        console.print(printable(row.title), style="bold")
        for sequence in row.sequences:
            console.print(f"  -- {printable(sequence.heading)}", style="yellow")
            for note in sequence.notes:
                console.print(f"     {printable(note)}", style="yellow")
            for line in marked(sequence).split() if sequence.pieces else ():
                console.print(Text.assemble("  | ", line))


def marked(sequence: ShownSequence, most: int = _MOST_TOKENS) -> Text:
    """Return the text of at most `most` tokens, with ⟦ ⟧ around trained tokens."""
    count, half = len(sequence.pieces), most // 2
    numbers = [*range(count)] if count <= most else [*range(half), *range(count - half, count)]
    text, was_trained, previous = Text(), False, -1
    for number in numbers:
        is_trained = sequence.weights[number] != 0
        left_out = number - previous - 1
        if was_trained and (left_out or not is_trained):
            text.append("⟧")
            was_trained = False
        if left_out:
            text.append(f" [... {left_out:,} tokens ...] ", "yellow")
        if is_trained and not was_trained:
            text.append("⟦")
        style = _STYLES[is_trained, number % 2]
        text.append(_unmarked(sequence.pieces[number]), f"{style} underline" if sequence.special[number] else style)
        was_trained, previous = is_trained, number
    return text.append("⟧") if was_trained else text


def _unmarked(piece: str) -> str:
    """Return the text of a token, with escapes for the characters ⟦ and ⟧."""
    return printable(piece).replace("\t", "→\t").replace("⟦", r"\u27e6").replace("⟧", r"\u27e7")
