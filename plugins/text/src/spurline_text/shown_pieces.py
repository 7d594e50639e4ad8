"""Texts that show a sequence token by token, from the bytes of each token. Needs no tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator


def shown(pieces: Iterable[bytes]) -> Iterator[str]:
    """A text for each piece, in order: its characters as they are.

    Bytes of a character that goes on in the next piece are `<F0 9F>`, those that complete it `<98 80 = 😀>`. Bytes that
    are no UTF-8 are `\\xff`.
    """
    pending = b""
    for piece in pieces:
        whole, head = pending + piece, ""
        text, used = codecs.utf_8_decode(whole, "backslashreplace", False)
        if pending and not used:
            # Not complete yet.
            pending = whole
            yield f"<{_hex(piece)}>"
            continue
        if pending and whole.startswith(text[0].encode()):
            size = len(text[0].encode())
            head, text = f"<{_hex(piece[: size - len(pending)])} = {text[0]}>", text[1:]
        elif pending:
            # It never was one: bytes that are no UTF-8 decode to a backslash and more.
            whole = piece
            text, used = codecs.utf_8_decode(piece, "backslashreplace", False)
        pending = whole[used:]
        yield head + text + (f"<{_hex(pending)}>" if pending else "")


def text_of(pieces: Iterable[bytes]) -> str:
    """The text of a sequence; bytes that are no UTF-8 are `\\xff`."""
    return b"".join(pieces).decode(errors="backslashreplace")


def _hex(piece: bytes) -> str:
    return piece.hex(" ").upper()
