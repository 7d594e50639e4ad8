"""The `sequential` tokenization: order, length rules, counts, and errors over whole datasets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.config.run_config import DataConfig
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text.configs import HfDatasetConfig, SequentialTokenizationConfig
from spurline_text.encoding import RowEncoder, Sample
from spurline_text.testing.tokenization_contract import ListDataset
from spurline_text.tokenization import ROWS_PER_CALL, SequentialTokenization, distinct_labels


class Rows(ListDataset):
    """A dataset of rows given in the test. A row that is an error is raised."""

    def __getitem__(self, row):
        values = super().__getitem__(row)
        if isinstance(values, Exception):
            raise values
        return values


def ids(tokens, prompt_length):
    tokens = list(tokens)
    return {"input_ids": tokens, "loss_mask": [int(place >= prompt_length) for place in range(len(tokens))]}


def tokenize(tokenizer, *row_lists, labels=None, on_bad_row="error", **settings):
    config = HfDatasetConfig(path="rows.jsonl", on_bad_row=on_bad_row)
    data = DataConfig(train=(config,), **settings)
    names = labels or [f"d{number}" for number in range(len(row_lists))]
    sources = [DatasetToTokenize(Rows(rows, name), config) for rows, name in zip(row_lists, names, strict=True)]
    return SequentialTokenization(SequentialTokenizationConfig(), tokenizer=tokenizer, data=data).tokenize(sources)


def test_samples_keep_the_order_of_datasets_and_rows(make_tokenizer):
    first = [ids([1, 2, 3], 1), ids([4, 5], 1)]
    second = [{"prompt": "a", "completion": "b"}]
    store = tokenize(make_tokenizer(), first, second).store
    assert store.labels == ("d0", "d1")
    assert [store.uid(index) for index in range(3)] == ["d0:0", "d0:1", "d1:0"]
    assert store.tokens[:5].tolist() == [1, 2, 3, 4, 5]
    assert store.loss_mask[:5].tolist() == [0, 1, 1, 0, 1]
    assert (store.tokens.dtype, store.loss_mask.dtype, store.offsets.dtype) == (np.int32, np.uint8, np.int64)


def test_rows_over_several_chunks_come_out_as_one_by_one(make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a " * (n % 7)}]}
        for n in range(ROWS_PER_CALL + 3)
    ]
    store = tokenize(tokenizer, rows).store
    config = HfDatasetConfig(path="x")
    encoder = RowEncoder(DatasetToTokenize(Rows(rows), config), tokenizer, DataConfig(train=(config,)))
    singles = [outcome for row in range(len(rows)) for outcome in encoder.encode([row])]
    assert all(isinstance(outcome, Sample) for outcome in singles)
    assert store.tokens.tolist() == [token for outcome in singles for token in outcome.tokens]
    assert store.loss_mask.tolist() == [flag for outcome in singles for flag in outcome.loss_mask]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1, max_size=9
    ),
    max_length=st.integers(2, 12),
    too_long=st.sampled_from(["truncate", "drop"]),
)
def test_every_row_is_kept_cut_or_dropped_for_one_reason(make_tokenizer, rows, max_length, too_long):
    expected: dict[str, int] = {}
    kept, truncated = [(3, 1)], 0
    for length, prompt in rows:
        prompt = max(prompt, 1)
        if prompt >= length:
            expected["no_loss_tokens"] = expected.get("no_loss_tokens", 0) + 1
        elif length <= max_length:
            kept.append((length, prompt))
        elif too_long == "drop":
            expected["too_long"] = expected.get("too_long", 0) + 1
        elif prompt >= max_length:
            reason = "no_loss_tokens_after_truncation"
            expected[reason] = expected.get(reason, 0) + 1
        else:
            kept.append((max_length, prompt))
            truncated += 1
    data = [ids(range(3), 1), *(ids(range(length), prompt) for length, prompt in rows)]
    if max_length < 3:
        data[0], kept[0] = ids(range(2), 1), (2, 1)
    result = tokenize(make_tokenizer(), data, max_length=max_length, too_long=too_long)
    assert result.dropped == expected
    assert result.truncated == truncated
    assert result.store.lengths().tolist() == [length for length, _ in kept]
    flags = [[0] * prompt + [1] * (length - prompt) for length, prompt in kept]
    assert result.store.loss_mask.tolist() == [flag for sample in flags for flag in sample]
    assert len(result.store) + sum(result.dropped.values()) == len(data)


def test_the_first_sample_of_each_reason_is_named(make_tokenizer):
    rows = [ids([1, 2], 1), ids([1, 2], 2), ids([1, 2], 2), ids(range(9), 1), ids(range(9), 6)]
    result = tokenize(make_tokenizer(), rows, max_length=5)
    assert result.dropped == {"no_loss_tokens": 2, "no_loss_tokens_after_truncation": 1}
    assert result.examples == {
        "no_loss_tokens": "d0.jsonl:2",
        "truncated": "d0.jsonl:4",
        "no_loss_tokens_after_truncation": "d0.jsonl:5",
    }


def test_a_sample_over_max_length_is_an_error_naming_row_and_length_when_asked(make_tokenizer):
    with pytest.raises(DataError, match=r"^d0\.jsonl:2: the sample has 9 tokens, over data\.max_length: 5\. Raise"):
        tokenize(make_tokenizer(), [ids([1, 2], 1), ids(range(9), 1)], max_length=5, too_long="error")


def test_bad_rows_are_counted_when_skipped_and_unreadable_ones_too(make_tokenizer):
    rows = [DataError("d0.jsonl:1: not valid JSON"), ids([1, 2], 1), {"input_ids": [1]}]
    result = tokenize(make_tokenizer(), rows, on_bad_row="skip")
    assert result.dropped == {"malformed_row": 2}
    assert result.examples == {"malformed_row": "d0.jsonl:1"}
    with pytest.raises(DataError, match=r"^d0\.jsonl:1: not valid JSON$"):
        tokenize(make_tokenizer(), rows)


def test_a_dataset_without_usable_sample_is_an_error_with_reasons_and_counts(make_tokenizer):
    unusable = [ids([1, 2], 2), ids([1, 2], 2), ids(range(9), 6)]
    with pytest.raises(DataError) as error:
        tokenize(make_tokenizer(), [ids([1, 2], 1)], unusable, max_length=5)
    assert str(error.value) == (
        "d1: no usable sample in 3 rows. Left out: no_loss_tokens: 2 (first at d1.jsonl:1), "
        "no_loss_tokens_after_truncation: 1 (first at d1.jsonl:3). Raise data.max_length."
    )


def test_datasets_with_the_same_label_get_distinct_uids(make_tokenizer):
    store = tokenize(make_tokenizer(), [ids([1, 2], 1)], [ids([1, 2], 1)], labels=["train", "train"]).store
    assert [store.uid(0), store.uid(1)] == ["train:0", "train#2:0"]
    assert distinct_labels(["a", "a", "a#2"]) == ["a", "a#2", "a#2#2"]


def test_long_texts_do_not_make_the_tokenizer_warn(make_tokenizer, caplog):
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    assert tokenize(tokenizer, [{"prompt": "hello " * 9, "completion": "fine"}]).store.lengths()[0] > 4
    assert "longer than the specified maximum" not in caplog.text
