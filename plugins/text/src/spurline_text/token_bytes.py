"""Encode texts without character offsets, and compute loss masks from the bytes of the tokens.

Computing offsets takes a quarter of the time of an encoding. In a byte-level vocabulary each token stands for some
bytes. If the joined bytes of all tokens equal the bytes of the text, the sizes of the tokens give their positions.
This is checked for each text. A text that the tokenizer changed (a normalizer, an unknown character) fails the check.
Such a text is declined: it gets no mask here.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
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


class TokenBytes:
    """The bytes of each token of a byte-level tokenizer. Each token is looked up once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer)

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
        return [self._masked(*one) for one in zip(encodings, texts, spans, strict=True)]

    def _masked(self, encoding: Encoding, text: str, spans: Sequence[Span]) -> Masked | None:
        ids = encoding.ids
        pieces, written = self._pieces.of_all(ids), text.encode()
        if b"".join(pieces) != written:
            return None
        # For short lists, these functions of Python are faster than those of numpy.
        ends = list(accumulate(map(len, pieces)))
        mask = np.zeros(len(ids), np.uint8)
        for start, stop in spans:
            if len(written) != len(text):
                start, stop = len(text[:start].encode()), len(text[:stop].encode())
            if start < stop:
                # A span covers the tokens that end after its start and start before its stop.
                mask[bisect_right(ends, start) : bisect_left(ends, stop) + 1] = 1
        return np.array(ids, np.int32), mask


def _keeps_offsets(processor: dict[str, Any]) -> bool:
    if processor["type"] == "Sequence":
        return all(map(_keeps_offsets, processor["processors"]))
    return processor["type"] in _KEEP_OFFSETS and not processor.get("trim_offsets", False)
