"""Turn trained character spans of a text into a loss mask over its tokens.

In: the one encoding of the text (it knows which characters each token covers) and spans `[start, stop)`. Out: uint8
mask. A token is trained when it covers at least one trained character, the rule of `apply_chat_template(...,
return_assistant_tokens_mask=True)`. So a token that the tokenizer merged across the start of a turn (a header's newline
with the newline that begins the content, say) is trained as a whole.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

Span = tuple[int, int]
"""Characters `[start, stop)` of a text."""


def mask_of_spans(encoding: Encoding, spans: Iterable[Span]) -> NDArray[np.uint8]:
    """1 on every token that covers a character of a span, uint8 [tokens]."""
    mask = np.zeros(len(encoding), dtype=np.uint8)
    for start, stop in spans:
        first, last = _token_range(encoding, start, stop)
        mask[first : last + 1] = 1
    return mask


def _token_range(encoding: Encoding, start: int, stop: int) -> tuple[int, int]:
    """First and last token that cover a character of the span; (0, -1) when none does."""
    first = next((token for char in range(start, stop) if (token := encoding.char_to_token(char)) is not None), None)
    if first is None:
        return 0, -1
    last = first
    for char in range(stop - 1, start - 1, -1):
        token = encoding.char_to_token(char)
        if token is not None:
            last = token
            break
    # The lookup finds the first token of a character; a character of several bytes may be spread over several tokens.
    while _covers(encoding, last + 1, start, stop):
        last += 1
    # Tokens of white space alone cover no character when the tokenizer trims offsets; they end inside the span.
    while _covers(encoding, first - 1, start, stop):
        first -= 1
    return first, last


def _covers(encoding: Encoding, token: int, start: int, stop: int) -> bool:
    """Whether a token next to the known range belongs to the span as well."""
    if not 0 <= token < len(encoding):
        return False
    chars = encoding.token_to_chars(token)
    if chars is None:
        return False
    begin, end = chars
    return start < end <= stop if begin == end else begin < stop and end > start
