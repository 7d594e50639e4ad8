"""Rows with a prompt, a chosen and a rejected answer, in every form they come in, and what is wrong with others."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spurline.config.run_config import DataConfig
from spurline.data.token_store import Tokenized
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_preference.rows import SIDES, Side, has_labels, read_label, side_of
from spurline_text.configs import HfDatasetConfig, SequentialTokenizationConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.tokenization import SequentialTokenization
from spurline_text.tokenizer import load_tokenizer

USER = {"role": "user", "content": "2 1"}
SYSTEM = {"role": "system", "content": "Sort."}
GOOD, BAD = {"role": "assistant", "content": "1 2"}, {"role": "assistant", "content": "2 1"}

MESSAGE_FORMS: dict[str, dict[str, Any]] = {
    "prompt and answers are messages": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "answers are single messages": {"prompt": [USER], "chosen": GOOD, "rejected": BAD},
    "the prompt is in messages": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "answers are whole conversations": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "and the prompt is given as text too": {"prompt": "2 1", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "the prompt is text, answers are messages": {"prompt": "2 1", "chosen": [GOOD], "rejected": [BAD]},
    "it is called instruction": {"instruction": "2 1", "chosen": [GOOD], "rejected": [BAD]},
    "and is in the answers too": {"instruction": "2 1", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
}


@pytest.fixture
def tokenizer(spurline_tiny_model: Path) -> Any:
    from spurline.config.run_config import ModelConfig

    return load_tokenizer(ModelConfig(path=str(spurline_tiny_model)))


def opened(rows: list[dict[str, Any]], folder: Path, **settings: Any) -> DatasetToTokenize:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = HfDatasetConfig(path=str(path), **settings)
    return DatasetToTokenize(HfDataset(config), config)


def tokenize(
    rows: list[dict[str, Any]], tokenizer: Any, folder: Path, sides: tuple[Side, ...] = SIDES, **settings: Any
) -> Tokenized:
    source = opened(rows, folder, **settings)
    data = DataConfig(train=(source.config,), max_length=256)
    found = [side_of(source, side) for side in sides]
    return SequentialTokenization(SequentialTokenizationConfig(), tokenizer=tokenizer, data=data).tokenize(found)


def texts(tokenized: Tokenized, tokenizer: Any) -> list[tuple[str, str]]:
    """For each sample its text, and what of it is trained."""
    store = tokenized.store
    found = []
    for start, stop in zip(store.offsets[:-1], store.offsets[1:], strict=True):
        tokens, mask = store.tokens[start:stop], store.loss_mask[start:stop].astype(bool)
        found.append((tokenizer.decode(tokens.tolist()), tokenizer.decode(tokens[mask].tolist())))
    return found


@pytest.mark.parametrize("form", MESSAGE_FORMS)
def test_every_form_of_messages_gives_the_same_two_samples(form: str, tokenizer: Any, tmp_path: Path) -> None:
    expected = texts(tokenize([MESSAGE_FORMS["prompt and answers are messages"]], tokenizer, tmp_path), tokenizer)
    assert ["1 2" in trained and "2 1" not in trained for _, trained in expected] == [True, False]
    assert ["2 1" in trained for _, trained in expected] == [False, True]
    assert texts(tokenize([MESSAGE_FORMS[form]], tokenizer, tmp_path), tokenizer) == expected


def test_text_is_prompt_and_answer_with_an_end_token_and_loss_on_the_answer(tokenizer: Any, tmp_path: Path) -> None:
    found = texts(
        tokenize([{"prompt": "Sort 2 1:", "chosen": " 1 2", "rejected": " 2 1"}], tokenizer, tmp_path), tokenizer
    )
    end = tokenizer.eos_token
    assert [trained for _, trained in found] == [f" 1 2{end}", f" 2 1{end}"]
    assert [text for text, _ in found] == [f"Sort 2 1: 1 2{end}", f"Sort 2 1: 2 1{end}"]


def test_a_prompt_called_instruction_is_a_turn_as_in_rows_of_one_answer(tokenizer: Any, tmp_path: Path) -> None:
    text = {"prompt": "2 1", "chosen": "1 2", "rejected": "2 1"}
    expected = texts(tokenize([MESSAGE_FORMS["prompt and answers are messages"]], tokenizer, tmp_path), tokenizer)
    assert texts(tokenize([text], tokenizer, tmp_path, columns={"instruction": "prompt"}), tokenizer) == expected
    row = {"instruction": "2", "input": "1", "chosen": [GOOD], "rejected": [BAD]}
    [(whole, trained), _] = texts(tokenize([row], tokenizer, tmp_path), tokenizer)
    assert "user\n2\n\n1<|im_end|>" in whole
    assert trained.startswith("1 2")


def test_conversations_part_where_they_first_differ(tokenizer: Any, tmp_path: Path) -> None:
    turns = [SYSTEM, USER, GOOD, USER]
    row = {"chosen": [*turns, GOOD], "rejected": [*turns, BAD, USER, GOOD]}
    (_, chosen), (_, rejected) = texts(tokenize([row], tokenizer, tmp_path), tokenizer)
    assert chosen.count("1 2") == 1
    assert (rejected.count("2 1"), rejected.count("1 2")) == (1, 1)


def test_columns_may_have_other_names_in_the_file(tokenizer: Any, tmp_path: Path) -> None:
    row = {"question": "a", "better": "b", "worse": "c", "completion": "no answer of ours"}
    columns = {"prompt": "question", "chosen": "better", "rejected": "worse"}
    found = texts(tokenize([row], tokenizer, tmp_path, columns=columns), tokenizer)
    assert [text.removesuffix(tokenizer.eos_token) for text, _ in found] == ["ab", "ac"]


# The columns of Axolotl's `chatml.*` and `llama3.*`, and the settings that read them.
AXOLOTL: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "intel": ({"system": "Sort.", "question": "2 1", "chosen": "1 2", "rejected": "2 1"}, {"instruction": "question"}),
    "icr": ({"system": "Sort.", "input": "2 1", "chosen": "1 2", "rejected": "2 1"}, {"instruction": "input"}),
    "pairs": ({"system": "Sort.", "prompt": "2 1", "chosen": "1 2", "rejected": "2 1"}, {"instruction": "prompt"}),
    "argilla": (
        {"system": "Sort.", "instruction": "2 1", "chosen_response": "1 2", "rejected_response": "2 1"},
        {"chosen": "chosen_response", "rejected": "rejected_response"},
    ),
    "ultra": ({"system": "Sort.", "prompt": "2 1", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
    "argilla_chat": ({"system": "Sort.", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, {}),
    "chat_template": ({"messages": [SYSTEM, USER], "chosen": GOOD, "rejected": BAD}, {}),
}


@pytest.mark.parametrize("name", AXOLOTL)
def test_rows_for_axolotl_are_read_with_a_mapping_of_columns(name: str, tokenizer: Any, tmp_path: Path) -> None:
    plain = {"prompt": [SYSTEM, USER], "chosen": [GOOD], "rejected": [BAD]}
    row, columns = AXOLOTL[name]
    expected = texts(tokenize([plain], tokenizer, tmp_path), tokenizer)
    assert texts(tokenize([row], tokenizer, tmp_path, columns=columns), tokenizer) == expected


def test_whole_texts_part_where_they_first_differ_if_no_other_column_may_be_the_prompt(
    tokenizer: Any, tmp_path: Path
) -> None:
    row = {"chosen": "The sky is blue.", "rejected": "The sky is green.", "score": 3}
    found = texts(tokenize([row], tokenizer, tmp_path), tokenizer)
    assert [trained.removesuffix(tokenizer.eos_token) for _, trained in found] == [" blue.", " green."]
    with pytest.raises(DataError, match="prompt is missing"):
        tokenize([{**row, "question": "What colour is the sky?"}], tokenizer, tmp_path)


SINGLE: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "messages": ({"prompt": [USER], "completion": [GOOD]}, {}),
    "a single message": ({"prompt": [USER], "completion": GOOD}, {}),
    "turns as text": ({"instruction": "2 1", "completion": "1 2"}, {}),
    "Axolotl's intel": ({"question": "2 1", "completion": "1 2"}, {"instruction": "question"}),
    "Axolotl's prompt_pairs": ({"prompt": "2 1", "completion": "1 2"}, {"instruction": "prompt"}),
    "a whole conversation": ({"completion": [USER, GOOD]}, {}),
    "and the prompt is given as text too": ({"prompt": "2 1", "completion": [USER, GOOD]}, {}),
}


@pytest.mark.parametrize("form", SINGLE)
def test_every_form_of_a_single_answer_gives_the_same_sample(form: str, tokenizer: Any, tmp_path: Path) -> None:
    row, columns = SINGLE[form]
    row = {**row, "label": True}
    found = texts(tokenize([row], tokenizer, tmp_path, sides=("completion",), columns=columns), tokenizer)
    expected = texts(tokenize([MESSAGE_FORMS["prompt and answers are messages"]], tokenizer, tmp_path), tokenizer)
    assert found == expected[:1]


@pytest.mark.parametrize(
    ("value", "expected"), [(True, 1), (False, -1), (1, 1), (0, -1), ("True", 1), ("false", -1), ("0", -1)]
)
def test_labels_are_true_or_false_as_values_and_as_text(value: Any, expected: int, tmp_path: Path) -> None:
    assert read_label(opened([{"prompt": "a", "completion": "b", "label": value}], tmp_path), 0) == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": "good"}, r"jsonl:1: label is text \('good'\), expected true"),
        ({"prompt": "a", "completion": "b", "label": None}, "label is null"),
        ({"prompt": "a", "completion": "b", "lable": True}, "label is missing. Did you mean 'lable'"),
    ],
)
def test_a_row_without_a_label_is_named(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = opened([row], tmp_path)
    read = partial(read_label, source, 0) if "label" in row else partial(has_labels, source)
    with pytest.raises(DataError, match=message):
        read()


def test_a_row_with_a_malformed_label_may_be_skipped(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in ("good", True)]
    found = tokenize(rows, tokenizer, tmp_path, sides=("completion",), on_bad_row="skip")
    assert (len(found.store), found.dropped) == (1, {"malformed_row": 1})


ERRORS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"prompt": "a", "chosen": "b", "rejcted": "c"}, {}, r"pairs.jsonl:1: rejected is missing. Did you mean 'rejcted'"),
    ({"query": "a", "chosen": "b", "rejected": "c"}, {}, r"prompt is missing.*`columns: \{prompt: NAME\}`"),
    ({"prompt": "a", "completion": "b"}, {}, r"chosen is missing.*columns: \{chosen: NAME\}"),
    ({"prompt": "a", "chosen": 3, "rejected": "c"}, {}, r"chosen is a number \(3\)"),
    ({"prompt": [USER], "chosen": [GOOD], "rejected": "c"}, {}, r"rejected is text \('c'\), but prompt is a list"),
    ({"chosen": [USER, GOOD], "rejected": [SYSTEM, BAD]}, {}, r"prompt is missing, and chosen and rejected begin with"),
    ({"prompt": "a"}, {"columns": {"chosn": "x"}}, r"columns.chosn is not a column .* Did you mean 'chosen'"),
]


@pytest.mark.parametrize(("row", "settings", "message"), ERRORS, ids=lambda value: str(value)[:40])
def test_a_malformed_row_is_named_with_field_and_fix(
    row: dict[str, Any], settings: dict[str, Any], message: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        tokenize([row], tokenizer, tmp_path, **settings)


def test_malformed_rows_are_counted_when_they_may_be_skipped(tokenizer: Any, tmp_path: Path) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    found = tokenize([{"prompt": "a", "chosen": "b"}, good], tokenizer, tmp_path, on_bad_row="skip")
    assert (len(found.store), found.dropped) == (2, {"malformed_row": 2})
