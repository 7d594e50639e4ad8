"""Raw text: every token is trained, long texts are cut into samples, and both tokenizations do the same."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenized_rows import tokenized

from spurline.errors import DataError

TEXTS = ["hello world, how are you today?", "I am fine. " * 30, "The answer is 42."]


def read(tmp_path, tokenizer, rows, *, kind="sequential", **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tokenized(path, tokenizer, kind, **settings)


def samples(made):
    view = made.store.view(np.arange(len(made.store)))
    return [(view.tokens(i).tolist(), view.loss_mask(i).tolist()) for i in range(len(view))]


def test_a_column_text_is_read_as_raw_text_with_loss_on_every_token_and_an_end(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    [(tokens, mask)] = samples(read(tmp_path, tokenizer, [{"text": TEXTS[0]}]))
    assert tokens == [*tokenizer(TEXTS[0])["input_ids"], tokenizer.eos_token_id]
    assert mask == [0, *[1] * (len(tokens) - 1)]
    [(tokens, _)] = samples(read(tmp_path, tokenizer, [{"text": TEXTS[0]}], dataset={"append_eos": False}))
    assert tokens == tokenizer(TEXTS[0])["input_ids"]


def test_a_long_text_is_cut_into_samples_that_hold_all_of_it(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    made = read(tmp_path, tokenizer, [{"text": text} for text in TEXTS], max_length=16)
    whole = [*tokenizer(TEXTS[1])["input_ids"], tokenizer.eos_token_id]
    pieces = [tokens for (tokens, mask), row in zip(samples(made), made.store.row.tolist(), strict=True) if row == 1]
    assert [token for piece in pieces for token in piece] == whole
    assert max(map(len, pieces)) == 16
    assert all(mask == [0, *[1] * (len(tokens) - 1)] for tokens, mask in samples(made))
    assert made.truncated == 0


@pytest.mark.parametrize("too_long", [None, "split", "truncate", "drop"])
def test_parallel_tokenization_gives_the_same_samples(tmp_path, make_tokenizer, too_long):
    tokenizer = make_tokenizer()
    rows = [{"text": text} for text in TEXTS]
    one = read(tmp_path, tokenizer, rows, max_length=16, too_long=too_long)
    other = read(tmp_path, tokenizer, rows, kind="parallel", max_length=16, too_long=too_long)
    assert samples(one) == samples(other)
    assert one.store.row.tolist() == other.store.row.tolist()
    assert (one.dropped, one.truncated, one.examples) == (other.dropped, other.truncated, other.examples)


def test_other_samples_are_split_only_when_told_to(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer()
    rows = [{"prompt": "question ", "completion": "answer " * 30}]
    assert len(read(tmp_path, tokenizer, rows, max_length=16).store) == 1
    made = read(tmp_path, tokenizer, rows, max_length=16, too_long="split")
    assert len(made.store) > 2
    ids = list(range(5, 25))
    given = [{"input_ids": ids, "labels": [-100] * 4 + ids[4:]}]
    split = samples(read(tmp_path, tokenizer, given, max_length=8, too_long="split"))
    assert [tokens for tokens, _ in split] == [ids[:8], ids[8:16], ids[16:]]
    assert [mask for _, mask in split] == [[0] * 4 + [1] * 4, [0] + [1] * 7, [0] + [1] * 3]


def test_a_row_without_a_piece_that_has_loss_is_counted_as_left_out(tmp_path, make_tokenizer):
    # The one token with loss begins the second piece, where nothing precedes it.
    rows = [
        {"input_ids": list(range(5, 14)), "loss_mask": [0] * 8 + [1]},
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
    ]
    made = read(tmp_path, make_tokenizer(), rows, max_length=8, too_long="split")
    assert made.store.row.tolist() == [1]
    assert made.dropped == {"no_loss_tokens_after_truncation": 1}


SURROGATE = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "cut \\ud83d"}]}\n'
GOOD = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "whole \\ud83d\\ude00"}]}\n'


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
def test_half_a_surrogate_pair_is_a_bad_row_that_is_named_or_skipped(tmp_path, make_tokenizer, kind):
    tokenizer = make_tokenizer("chatml")
    path = tmp_path / "bad.jsonl"
    path.write_text(GOOD + SURROGATE, encoding="utf-8")

    expected = r"bad\.jsonl:2: messages has half of a surrogate pair \(\\ud83d\)"
    with pytest.raises(DataError, match=expected):
        tokenized(path, tokenizer, kind, dataset={"on_bad_row": "error"})
    made = tokenized(path, tokenizer, kind, dataset={"on_bad_row": "skip"})
    assert (len(made.store), made.dropped) == (1, {"malformed_row": 1})
