"""Find the bytes of each single token, and show a sequence token by token.

A token may be a part of a character: byte-level vocabularies cut an emoji into several tokens. For each of these tokens
`tokenizer.decode` would return a replacement character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""The name of a byte in vocabularies with byte fallback."""


class TokenPieces:
    """The bytes of each token of a tokenizer. Each token is looked up only once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = dict(tokenizer.added_tokens_decoder)
        self._special = {*tokenizer.all_special_ids, *(i for i, token in self._added.items() if token.special)}
        self._kind = _kind_of(tokenizer)
        self.are_bytes = self._kind == "bytes"
        """Whether the vocabulary is byte-level: each byte of a text has its own character in the names of tokens."""
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """Return the bytes of a token. An id that is not in the vocabulary gives `<token N>`."""
        return self.of_all([token_id])[0]

    def of_all(self, token_ids: list[int]) -> list[bytes]:
        unknown = list({*token_ids}.difference(self._known))
        names: list[Any] = self._tokenizer.convert_ids_to_tokens(unknown) if unknown else []  # type: ignore[assignment]
        for token_id, name in zip(unknown, names, strict=True):
            self._known[token_id] = self._bytes(token_id, name)
        return [self._known[token_id] for token_id in token_ids]

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is a special token such as `<|im_end|>`, and not text."""
        return token_id in self._special

    def _bytes(self, token_id: int, token: Any) -> bytes:
        if token_id in self._added:
            return str(self._added[token_id].content).encode(errors="backslashreplace")
        if token is None:
            return f"<token {token_id}>".encode()
        if self._kind == "bytes":
            try:
                return token.translate(_byte_of_sign()).encode("latin-1")
            except UnicodeEncodeError:
                pass
        elif self._kind == "sentencepiece":
            byte = _BYTE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode(errors="backslashreplace")
        return str(self._tokenizer.decode([token_id])).encode(errors="backslashreplace")


def _kind_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return how the vocabulary writes bytes and spaces. For kind `other`, the tokenizer must decode each token."""
    decoder = tokenizer.backend_tokenizer.decoder if tokenizer.is_fast else None  # type: ignore[attr-defined]
    if decoder is None:
        return "other"
    names = _names(json.loads(decoder.__getstate__()))
    if "ByteLevel" in names:
        return "bytes"
    return "sentencepiece" if names & {"ByteFallback", "Metaspace"} else "other"


def _names(decoder: Any) -> set[str]:
    return {decoder["type"]}.union(*(_names(inner) for inner in decoder.get("decoders", ())))


@cache
def _byte_of_sign() -> dict[int, int]:
    """Map the characters of byte-level vocabularies (GPT-2) to bytes, and others below 256 to 256, which is no byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {byte: byte for byte in printable} | {256 + place: byte for place, byte in enumerate(others)}
    return dict.fromkeys(others, 256) | signs


def shown(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yield a text for each piece, in order.

    A character is shown in the piece that completes it. A piece that ends within a character ends with `⋯`. Bytes that
    are not UTF-8 are shown as `\\xff`.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    for piece in pieces:
        text = decoder.decode(piece)
        begun, _ = decoder.getstate()
        yield f"{text}⋯" if begun else text


def text_of(pieces: Iterable[bytes]) -> str:
    """Return the text of a sequence. Bytes that are not UTF-8 are shown as `\\xff`."""
    return b"".join(pieces).decode(errors="backslashreplace")
