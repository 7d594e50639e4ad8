"""Encode texts without character offsets, and compute loss masks from the bytes of the tokens.

Computing offsets takes a quarter of the time of an encoding. In a byte-level vocabulary each token stands for some
bytes. If the joined bytes of all tokens equal the bytes of the text, the sizes of the tokens give their positions.
This is checked for each text. A text that the tokenizer changed (a normalizer, an unknown character) fails the check.
Such a text is declined: it gets no mask here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spurline_text.token_pieces import TokenPieces

Span = tuple[int, int]
"""Characters `[start, stop)` of a text."""

Masked = tuple[NDArray[np.int32], NDArray[np.uint8]]
"""Token ids of a text, and a mask: 1 for each token that covers a character of a span, else 0."""

_KEEP_OFFSETS = ("ByteLevel", "TemplateProcessing")
"""Post-processors that do not change the offsets of tokens."""

_AT_ONCE = 1 << 18
"""Tokens whose bytes are joined at once. Joining takes about ten times the memory of the bytes."""


class TokenBytes:
    """The bytes of each token of a byte-level tokenizer. Each token is looked up once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer)
        # Token i stands for `_bytes[_starts[i]:][:_sizes[i]]`. A token that was not looked up yet has size -1.
        self._bytes = np.zeros(0, np.uint8)
        self._starts = np.zeros(len(tokenizer), np.int64)
        self._sizes = np.full(len(tokenizer), -1, np.int64)

    @staticmethod
    def fits(tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether the offsets of this tokenizer can be computed from the bytes of its tokens."""
        kind: Any = type(tokenizer)
        plain = PreTrainedTokenizerFast
        if not tokenizer.is_fast or kind.__call__ is not plain.__call__ or kind._encode_plus is not plain._encode_plus:
            return False
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        if not TokenPieces(tokenizer).are_bytes:
            return False
        return backend.post_processor is None or _keeps_offsets(json.loads(backend.post_processor.__getstate__()))

    def encode(self, texts: Sequence[str]) -> list[Encoding]:
        """Encode the texts without special tokens around them. The offsets of the result are meaningless.

        Two threads must not call it at the same time. One thread may call it while another thread is in `masked`.
        """
        backend: Any = self._tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        # Change only settings that differ, because a tokenizer cannot be changed while another thread uses it.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        split = bool(getattr(self._tokenizer, "split_special_tokens", False))
        if backend.encode_special_tokens != split:
            backend.encode_special_tokens = split
        return backend.encode_batch_fast(list(texts), add_special_tokens=False)

    def masked(
        self, encodings: Sequence[Encoding], texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[Masked | None]:
        """Return tokens and mask of each text, or None for a declined text. `encodings` come from `encode`."""
        lists = [encoding.ids for encoding in encodings]
        ids = np.fromiter(chain.from_iterable(lists), np.int64)
        sizes = self._sizes_of(ids)
        written, byte_ends = self._written(ids, sizes), np.cumsum(sizes)
        first_token = [0, *np.cumsum([len(found) for found in lists]).tolist()]
        first_byte = np.append(np.int64(0), byte_ends)[first_token].tolist()
        same = [
            written[start:stop] == text.encode()
            for (start, stop), text in zip(pairwise(first_byte), texts, strict=True)
        ]
        edges = _in_bytes(texts, [found if ok else () for found, ok in zip(spans, same, strict=True)], first_byte)
        # A span covers the tokens that end after its start and start before its stop.
        change = np.zeros(len(sizes) + 1, np.int64)
        np.add.at(change, np.searchsorted(byte_ends, edges[:, 0], "right"), 1)
        np.add.at(change, np.searchsorted(byte_ends - sizes, edges[:, 1], "left"), -1)
        tokens, mask = ids.astype(np.int32), (np.cumsum(change[:-1]) > 0).astype(np.uint8)
        return [
            (tokens[start:stop], mask[start:stop]) if ok else None
            for (start, stop), ok in zip(pairwise(first_token), same, strict=True)
        ]

    def _sizes_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        # In a vocabulary with gaps, an id can be larger than the number of tokens.
        more = int(ids.max(initial=-1)) + 1 - len(self._sizes)
        if more > 0:
            self._starts = np.append(self._starts, np.zeros(more, np.int64))
            self._sizes = np.append(self._sizes, np.full(more, -1, np.int64))
        sizes = self._sizes[ids]
        if sizes.min(initial=0) < 0:
            self._learn(np.unique(ids[sizes < 0]))
            sizes = self._sizes[ids]
        return sizes

    def _learn(self, ids: NDArray[np.int64]) -> None:
        pieces = self._pieces.of_all(ids.tolist())
        self._sizes[ids] = [len(piece) for piece in pieces]
        self._starts[ids] = len(self._bytes) + np.cumsum(self._sizes[ids]) - self._sizes[ids]
        self._bytes = np.append(self._bytes, np.frombuffer(b"".join(pieces), np.uint8))

    def _written(self, ids: NDArray[np.int64], sizes: NDArray[np.int64]) -> bytes:
        parts: list[bytes] = []
        for start in range(0, len(ids), _AT_ONCE):
            some, counts = ids[start : start + _AT_ONCE], sizes[start : start + _AT_ONCE]
            # If token i begins at byte e of the result, then result[e + b] is _bytes[_starts[i] + b].
            places = np.repeat(self._starts[some] - np.cumsum(counts) + counts, counts)
            places += np.arange(len(places))
            parts.append(self._bytes[places].tobytes())
        return b"".join(parts)


def _in_bytes(texts: Sequence[str], spans: Sequence[Sequence[Span]], first_byte: Sequence[int]) -> NDArray[np.int64]:
    """Return the non-empty spans as byte positions in the joined texts: int64 [spans, 2]."""
    bounds: list[int] = []
    for text, begin, found in zip(texts, first_byte, spans, strict=False):
        for start, stop in found:
            if start >= stop:
                continue
            if not text.isascii():
                start, stop = len(text[:start].encode()), len(text[:stop].encode())
            bounds += (begin + start, begin + stop)
    return np.array(bounds, np.int64).reshape(-1, 2)


def _keeps_offsets(processor: dict[str, Any]) -> bool:
    if processor["type"] == "Sequence":
        return all(map(_keeps_offsets, processor["processors"]))
    return processor["type"] in _KEEP_OFFSETS and not processor.get("trim_offsets", False)
