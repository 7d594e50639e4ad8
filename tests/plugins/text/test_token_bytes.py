"""Masks by the bytes of tokens equal those by the tokenizer's offsets, and a text that was changed is declined."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spurline.config.run_config import DataConfig
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text import encoding
from spurline_text.configs import HfDatasetConfig
from spurline_text.encoding import RowEncoder, Sample
from spurline_text.testing.tokenization_contract import ListDataset
from spurline_text.token_bytes import TokenBytes

TEXT = st.text(st.sampled_from("ab 42.\n\té😀漢e\u0301\u200b<>/|fine answer"), max_size=24) | st.sampled_from(
    ["<|im_end|>", "<think>\nwhy\n</think>\n\nso", "  fine ", "\r\n\n"]
)
CALL = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": st.just({"a": "é😀"})})})
ANSWER = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT},
    optional={"reasoning_content": TEXT, "tool_calls": st.lists(CALL, max_size=2)},
)
EXCHANGE = st.tuples(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": TEXT}), ANSWER)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"messages": st.lists(EXCHANGE, min_size=1, max_size=3).map(lambda pairs: [*sum(pairs, ())])},
        optional={"system": TEXT, "tools": st.just([{"type": "function", "function": {"name": "add"}}])},
    ),
    min_size=1,
    max_size=4,
)


def outcomes(tokenizer: PreTrainedTokenizerFast, rows: list[Any], train_on: str) -> list[Any]:
    config = HfDatasetConfig(path="rows.jsonl")
    data = DataConfig(train=(config,), train_on=train_on, max_length=100_000, on_ignored="warn")
    encoder = RowEncoder(DatasetToTokenize(ListDataset(rows), config), tokenizer, data)
    return [
        (made.row, list(made.tokens), made.loss_mask.tolist(), made.ignored) if isinstance(made, Sample) else made
        for made in encoder.encode(range(len(rows)))
    ]


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen3", "generation"])
@given(rows=ROWS, train_on=st.sampled_from(["last_assistant", "all_assistants"]))
@settings(max_examples=50, deadline=None)
def test_samples_equal_those_made_by_the_tokenizers_offsets(make_tokenizer, template, rows, train_on):
    tokenizer = make_tokenizer(template)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TokenBytes, "fits", staticmethod(lambda tokenizer: False))
        expected = outcomes(tokenizer, rows, train_on)
    assert outcomes(tokenizer, rows, train_on) == expected


def test_chats_of_a_byte_level_tokenizer_are_encoded_without_offsets(make_tokenizer, monkeypatch):
    texts: list[str] = []
    call = encoding.encode_batch
    monkeypatch.setattr(
        encoding, "encode_batch", lambda tokenizer, new, is_chat: texts.extend(new) or call(tokenizer, new, is_chat)
    )
    rows = [{"messages": [{"role": "user", "content": "é😀"}, {"role": "assistant", "content": "漢 fine"}]}]
    assert len(outcomes(make_tokenizer("chatml"), rows, "last_assistant")) == 1
    assert texts == []
    # Its offsets leave out white space that its tokens cover.
    assert len(outcomes(make_tokenizer("chatml", trim_offsets=True), rows, "last_assistant")) == 1
    assert len(texts) == 1


def test_texts_that_the_tokenizer_changes_are_declined(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    bytes_of_tokens = TokenBytes(tokenizer)
    texts = ["é", "e\u0301", "fine"]
    kept, changed, last = bytes_of_tokens.masked(bytes_of_tokens.encode(texts), texts, [[(0, 1)], [(0, 1)], [(1, 3)]])
    assert kept is not None
    assert kept[1].all()
    assert changed is None
    assert last is not None
    assert last[1].any()


def test_characters_without_a_token_are_declined_and_not_passed_over():
    backend = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert TokenBytes.fits(tokenizer)
    bytes_of_tokens, texts = TokenBytes(tokenizer), ["ab", "axb"]
    whole, cut = bytes_of_tokens.masked(bytes_of_tokens.encode(texts), texts, [[(1, 2)], [(1, 2)]])
    assert whole is not None
    assert (whole[0].tolist(), whole[1].tolist()) == ([0, 1], [0, 1])
    assert cut is None
