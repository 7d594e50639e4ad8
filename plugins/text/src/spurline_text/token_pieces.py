"""Return the bytes that each single token stands for.

A token need not be whole characters: byte-level vocabularies cut an emoji into several. `tokenizer.decode` of one such
token gives a replacement sign. Here it gives the token's bytes, and `shown_pieces` turns bytes into texts.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies with byte fallback name a byte."""


class TokenPieces:
    """The bytes of each token of a tokenizer, looked up once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._added: dict[int, Any] = dict(tokenizer.added_tokens_decoder)
        self._special = {*tokenizer.all_special_ids, *(i for i, token in self._added.items() if token.special)}
        self._kind = _kind_of(tokenizer)
        self._known: dict[int, bytes] = {}

    def of(self, token_id: int) -> bytes:
        """The bytes that a token stands for; a number without a token is `<token N>`."""
        return self.of_all([token_id])[0]

    def of_all(self, token_ids: list[int]) -> list[bytes]:
        """Return `of` for each, faster where they are many."""
        unknown = [token_id for token_id in token_ids if token_id not in self._known]
        names: list[Any] = self._tokenizer.convert_ids_to_tokens(unknown) if unknown else []  # type: ignore[assignment]
        for token_id, name in zip(unknown, names, strict=True):
            self._known[token_id] = self._bytes(token_id, name)
        return [self._known[token_id] for token_id in token_ids]

    @property
    def are_bytes(self) -> bool:
        """Return whether the vocabulary writes every byte of a text as a sign of its own."""
        return self._kind == "bytes"

    def is_special(self, token_id: int) -> bool:
        """Return whether it is a mark of the template or the model, such as `<|im_end|>`, and not text."""
        return token_id in self._special

    def _bytes(self, token_id: int, token: Any) -> bytes:
        """token: what the vocabulary calls it."""
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
    """How the vocabulary writes bytes and spaces: `bytes`, `sentencepiece`, or `other`, which has to be decoded."""
    if not tokenizer.is_fast:
        return "other"
    decoder = tokenizer.backend_tokenizer.decoder  # type: ignore[attr-defined]
    if decoder is None:
        return "other"
    names = _names(json.loads(decoder.__getstate__()))
    if "ByteLevel" in names:
        return "bytes"
    return "sentencepiece" if names & {"ByteFallback", "Metaspace"} else "other"


def _names(decoder: Any) -> set[str]:
    """Types of a decoder and of those inside it."""
    return {decoder["type"]}.union(*(_names(inner) for inner in decoder.get("decoders", ())))


@cache
def _byte_of_sign() -> dict[int, int]:
    """The byte of the sign that byte-level vocabularies write for it (GPT-2): printable ones stand for themselves.

    Characters of one byte that are no signs get a number that is no byte.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = {byte: byte for byte in printable} | {256 + place: byte for place, byte in enumerate(others)}
    return dict.fromkeys(others, 256) | signs
