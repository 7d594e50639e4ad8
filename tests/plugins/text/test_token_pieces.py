"""What single tokens stand for, also where a token is a part of a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from spurline_text.token_pieces import TokenPieces, shown, text_of

FACE = "😀".encode()


@pytest.fixture(scope="module")
def pieces(spurline_tiny_model: Path) -> TokenPieces:
    return TokenPieces(AutoTokenizer.from_pretrained(spurline_tiny_model))


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_the_bytes_of_tokens_make_up_the_text(pieces: TokenPieces, text: str) -> None:
    ids = pieces._tokenizer.encode(text, add_special_tokens=False)
    whole = [pieces.of(token_id) for token_id in ids]
    assert text_of(whole) == pieces._tokenizer.decode(ids)


def test_special_tokens_are_told_from_text(pieces: TokenPieces) -> None:
    ids = pieces._tokenizer.encode("<|im_end|>a")
    assert [pieces.is_special(token_id) for token_id in ids] == [True, False]
    assert pieces.of(ids[0]) == b"<|im_end|>"
    assert pieces.of(10**6) == b"<token 1000000>"


def test_sentencepiece_vocabularies_have_spaces_and_bytes() -> None:
    vocabulary = {"\u2581a": 0, "<0xF0>": 1, "<0x9F>": 2, "<unk>": 3}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    found = TokenPieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    assert [found.of(token_id) for token_id in range(3)] == [b" a", b"\xf0", b"\x9f"]


@pytest.mark.parametrize(
    ("given_pieces", "expected"),
    [
        ([b"a", b"b"], ["a", "b"]),
        ([FACE[:1], FACE[1:3], FACE[3:] + b"a"], ["⋯", "⋯", "😀a"]),
        ([b"a" + FACE[:2], FACE[2:] + FACE[:2], FACE[2:]], ["a⋯", "😀⋯", "😀"]),
        ([FACE[:2], b"ab", b"\xff"], ["⋯", "\\xf0\\x9fab", "\\xff"]),
        ([b""], [""]),
    ],
)
def test_a_character_is_shown_in_the_token_that_completes_it(given_pieces: list[bytes], expected: list[str]) -> None:
    assert list(shown(given_pieces)) == expected


@given(st.lists(st.binary(max_size=6)))
def test_there_is_one_text_for_each_piece_whatever_the_bytes(found: list[bytes]) -> None:
    assert len(list(shown(found))) == len(found)
