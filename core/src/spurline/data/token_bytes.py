"""Encode texts without asking the tokenizer for offsets, and mask their tokens by the bytes that each stands for.

Offsets cost a quarter of an encoding. The tokens of a byte-level vocabulary say themselves what they cover: where their
bytes, one token after another, are the bytes of the text, a token covers its own. That is compared for each text; one
that the tokenizer changed on the way (a normalizer, a character it does not know) is declined.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from spurline.data.token_pieces import TokenPieces

Span = tuple[int, int]
"""Characters `[start, stop)` of a text."""

Masked = tuple[list[int], NDArray[np.uint8]]
"""Token ids of a text, and for each whether it covers a character of a span: uint8, 0 or 1."""

_KEEP_OFFSETS = ("ByteLevel", "TemplateProcessing")
"""Post-processors after which a token covers all its bytes."""


class TokenBytes:
    """The bytes of each token of a byte-level tokenizer, looked up once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer)
        self._known: dict[int, bytes] = {}
        self._sizes = np.zeros(len(tokenizer), np.int64)

    @staticmethod
    def fits(tokenizer: PreTrainedTokenizerBase) -> bool:
        """Whether the tokenizer's offsets are those of its tokens' bytes, wherever these are the text's."""
        kind: Any = type(tokenizer)
        plain = PreTrainedTokenizerFast
        if not tokenizer.is_fast or kind.__call__ is not plain.__call__ or kind._encode_plus is not plain._encode_plus:
            return False
        backend: Any = tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        if not TokenPieces(tokenizer).are_bytes:
            return False
        return backend.post_processor is None or _keeps_offsets(json.loads(backend.post_processor.__getstate__()))

    def encode(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Masked | None]:
        """Tokens and mask of each text, without special tokens around it; None for one that is declined."""
        backend: Any = self._tokenizer.backend_tokenizer  # type: ignore[attr-defined]
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = bool(getattr(self._tokenizer, "split_special_tokens", False))
        tokens: list[list[int]] = [
            encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]
        try:
            written = [b"".join(map(self._known.__getitem__, ids)) for ids in tokens]
        except KeyError:
            self._learn(set(chain.from_iterable(tokens)).difference(self._known))
            written = [b"".join(map(self._known.__getitem__, ids)) for ids in tokens]
        same = [found == text.encode() for found, text in zip(written, texts, strict=True)]
        masks = self._masks(tokens, texts, [found if ok else () for found, ok in zip(spans, same, strict=True)])
        return [(ids, mask) if ok else None for ids, mask, ok in zip(tokens, masks, same, strict=True)]

    def _learn(self, token_ids: set[int]) -> None:
        for token_id in token_ids:
            piece = self._known[token_id] = self._pieces.of(token_id)
            if token_id >= len(self._sizes):
                # Vocabularies with gaps have ids beyond their size.
                self._sizes = np.append(self._sizes, np.zeros(token_id, np.int64))
            self._sizes[token_id] = len(piece)

    def _masks(
        self, tokens: Sequence[list[int]], texts: Sequence[str], spans: Sequence[Sequence[Span]]
    ) -> list[NDArray[np.uint8]]:
        """The masks of all texts, made at once: bytes are counted from the first text on."""
        sizes = self._sizes[np.fromiter(chain.from_iterable(tokens), np.int64)]
        ends = np.cumsum(sizes)
        first_token = [0, *np.cumsum([len(ids) for ids in tokens]).tolist()]
        bounds: list[int] = []
        for text, first, found in zip(texts, first_token, spans, strict=False):
            begin = int(ends[first - 1]) if found and first else 0
            for start, stop in found:
                if start < stop:
                    bounds += (
                        (begin + start, begin + stop)
                        if text.isascii()
                        else (
                            begin + len(text[:start].encode()),
                            begin + len(text[:stop].encode()),
                        )
                    )
        edges = np.array(bounds, np.int64).reshape(-1, 2)
        # From the first token that ends after the span's start to the last that starts before its stop.
        change = np.zeros(len(sizes) + 1, np.int64)
        np.add.at(change, np.searchsorted(ends, edges[:, 0], "right"), 1)
        np.add.at(change, np.searchsorted(ends - sizes, edges[:, 1], "left"), -1)
        mask = (np.cumsum(change[:-1]) > 0).astype(np.uint8)
        return [mask[start:stop] for start, stop in pairwise(first_token)]


def _keeps_offsets(processor: dict[str, Any]) -> bool:
    if processor["type"] == "Sequence":
        return all(map(_keeps_offsets, processor["processors"]))
    return processor["type"] in _KEEP_OFFSETS and not processor.get("trim_offsets", False)
