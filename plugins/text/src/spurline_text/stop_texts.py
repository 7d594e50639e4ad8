"""Find where a stop text ends a response, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\ufffd"
"""Tokenizers decode an incomplete character to this replacement character."""


class StopTexts:
    """Finds the token that completes a stop text in one response.

    It keeps only the end of the response, where a stop text may have begun. So each token is decoded only a few times.
    The result is the same as a search in the whole response.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]):
        assert all(texts), f"an empty stop text among {texts}"
        self._tokenizer = tokenizer
        self._texts = texts
        self._overlap = max(map(len, texts)) - 1
        self._settled_text = ""
        self._context: list[int] = []
        self._unsettled: list[int] = []

    def completed_by(self, token: int) -> bool:
        """Add the next token of the response, and return whether the response now contains a stop text."""
        self._unsettled.append(token)
        # Many tokenizers decode the first token of a text differently, so earlier tokens are decoded too.
        before = self._decode(self._context)
        seen = self._settled_text + self._decode(self._context + self._unsettled)[len(before) :]
        if any(text in seen for text in self._texts):
            return True
        if not seen.endswith(_INCOMPLETE):
            self._settled_text = seen[len(seen) - min(self._overlap, len(seen)) :]
            self._context, self._unsettled = self._unsettled, []
        return False

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
