"""How rows of each format become tokens and loss, and what is said about malformed ones."""

from __future__ import annotations

import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spurline.config.loading import load_config
from spurline.config.run_config import DataConfig
from spurline.errors import DataError, ModelError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_preference.rows import side_of
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.encoding import Dropped, RowEncoder
from spurline_text.prompts import prompt_and_reference, read_examples
from spurline_text.rows.formats import detect_format
from spurline_text.rows.rows import BadRowError, RowView
from spurline_text.testing.tokenization_contract import ListDataset
from spurline_text.tokenization import open_datasets

UNREAD = {"id", "source", "attention_mask"}
CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "fine"}]


def encode(tokenizer, *rows, **dataset_settings):
    config = HfDatasetConfig(path="rows.jsonl", **dataset_settings)
    data = DataConfig(train=(config,), max_length=10_000)
    return RowEncoder(DatasetToTokenize(ListDataset(rows), config), tokenizer, data).encode(range(len(rows)))


def parts(tokenizer, *rows, **dataset_settings):
    """Text before the loss and text with loss of the only row."""
    [outcome] = encode(tokenizer, *rows, **dataset_settings)
    mask = outcome.loss_mask.tolist()
    cut = mask.index(1)
    assert mask == [0] * cut + [1] * (len(mask) - cut)
    return tokenizer.decode(outcome.tokens[:cut]), tokenizer.decode(outcome.tokens[cut:])


def data(**settings):
    return DataConfig(train=(HfDatasetConfig(path="rows.jsonl"),), **settings)


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["id", "messages"], "chat"),
        (["conversations", "source"], "chat"),
        (["instruction", "input", "output"], "alpaca"),
        (["prompt", "completion"], "prompt_completion"),
        (["input_ids", "labels", "attention_mask"], "pretokenized"),
    ],
)
def test_the_format_follows_from_the_columns(columns, expected):
    assert detect_format(HfDatasetConfig(path="x"), dict.fromkeys(columns)) == expected
    renamed = HfDatasetConfig(path="x", columns={name: f"other {name}" for name in columns if name not in UNREAD})
    row = dict.fromkeys(name if name in UNREAD else f"other {name}" for name in columns)
    assert detect_format(renamed, row) == expected


def test_columns_that_fit_no_format_are_listed_with_what_each_format_needs(make_tokenizer):
    with pytest.raises(DataError) as error:
        encode(make_tokenizer(), {"question": "a", "answer": "b"})
    message = str(error.value)
    assert message.startswith("rows.jsonl:1: the columns (answer, question) fit no format.")
    for part in ("chat: messages", "alpaca: instruction, output", "prompt_completion: prompt, completion", "`columns:"):
        assert part in message


def test_bos_is_there_only_when_the_tokenizer_adds_it_and_the_end_token_only_once(make_tokenizer):
    row = {"prompt": "hello", "completion": " fine"}
    assert parts(make_tokenizer(), row) == ("hello", " fine<|end|>")
    assert parts(make_tokenizer(adds_bos=True), row) == ("<|begin|>hello", " fine<|end|>")
    assert parts(make_tokenizer(adds_bos=True, adds_eos=True), row) == ("<|begin|>hello", " fine<|end|>")
    ended = {"prompt": "hello", "completion": " fine<|end|>"}
    assert parts(make_tokenizer(), ended) == ("hello", " fine<|end|>")


def test_a_token_across_prompt_and_completion_is_trained(make_tokenizer):
    tokenizer = make_tokenizer()
    assert len(tokenizer.tokenize("wer")) == 1
    [outcome] = encode(tokenizer, {"prompt": "hello w", "completion": "er"})
    [alone] = encode(tokenizer, {"prompt": "hello ", "completion": "wer"})
    assert tokenizer.decode(outcome.tokens) == tokenizer.decode(alone.tokens) == "hello wer<|end|>"
    one_token = encode(tokenizer, {"prompt": "", "completion": "wer"}, columns={})[0]
    assert outcome.loss_mask.tolist()[-2:] == [1, 1]
    assert len(one_token.tokens) == 2


def test_a_tokenizer_without_end_token_cannot_train_completions(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="no end-of-sequence token"):
        encode(tokenizer, {"prompt": "a", "completion": "b"})


PARTS = [{"type": "text", "text": "fi"}, {"type": "text", "text": "ne"}]
SHAREGPT = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "fine"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        (
            {"instruction": "Add", "input": "1 2", "output": "3"},
            [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}],
        ),
        ({"conversations": SHAREGPT, "system": "be kind"}, [{"role": "system", "content": "be kind"}, *CHAT]),
        ({"messages": [CHAT[0], {"role": "assistant", "content": PARTS}]}, CHAT),
        ({"messages": json.dumps(CHAT)}, CHAT),
    ],
    ids=["alpaca", "sharegpt", "text parts", "json text"],
)
def test_rows_of_other_forms_read_as_openai_messages(make_tokenizer, row, messages):
    tokenizer = make_tokenizer("chatml")
    [outcome], [expected] = encode(tokenizer, row), encode(tokenizer, {"messages": messages})
    assert outcome.tokens.tolist() == expected.tokens.tolist()
    assert outcome.loss_mask.tolist() == expected.loss_mask.tolist()


@pytest.mark.parametrize(
    ("column", "value", "mask"),
    [("loss_mask", [1, 0, 1, 1], [0, 0, 1, 1]), ("labels", [-100, -100, 12, 13], [0, 0, 1, 1])],
)
def test_pretokenized_rows_keep_their_tokens_and_never_train_the_first(make_tokenizer, column, value, mask):
    [outcome] = encode(make_tokenizer(), {"input_ids": [10, 11, 12, 13], column: value})
    assert list(outcome.tokens) == [10, 11, 12, 13]
    assert outcome.loss_mask.tolist() == mask


MALFORMED = [
    ({"messages": None}, "messages is null"),
    ({"messages": "hello"}, "messages is text ('hello'), expected a list"),
    ({"messages": []}, "messages is an empty list"),
    ({"messages": ["hello"]}, "messages[0] is text ('hello'), expected an object"),
    ({"messages": [CHAT[0]]}, "messages has no assistant turn"),
    ({"messages": [{"content": "x"}]}, "messages[0] has no 'role'"),
    ({"messages": [{"role": "user"}]}, "messages[0] has no 'content'"),
    ({"messages": [CHAT[0], {"role": "asistant", "content": "x"}]}, "Did you mean 'assistant'?"),
    ({"messages": [CHAT[0], {"role": "asistant", "content": "x"}]}, "messages[1].role is text ('asistant')"),
    ({"messages": [{"from": 3, "value": "x"}]}, "messages[0].from is a number (3)"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content is a number (3), expected text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        "messages[0].content[0] is a part of type 'image'; only text parts",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].arguments is text that is not valid JSON",
    ),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0] is not a tool call"),
    ({"messages": CHAT, "tools": "add"}, "tools is text ('add'), expected a list of JSON schemas"),
    ({"messages": CHAT, "system": 3}, "system is a number (3), expected text"),
    ({"messages": [{"role": "system", "content": "a"}, *CHAT], "system": "b"}, "system is given, but"),
    ({"prompt": "a", "completion": 42}, "completion is a number (42), but prompt is text ('a')"),
    ({"prompt": CHAT[:1], "completion": CHAT[:1]}, "completion has no assistant turn"),
    ({"prompt": "a", "completion": None}, "completion is null"),
    ({"instruction": 3, "output": "b"}, "instruction is a number (3), expected text"),
    ({"instruction": "a", "input": ["x"], "output": "b"}, "input is a list, expected text"),
    ({"input_ids": []}, "input_ids is an empty list"),
    ({"input_ids": "1 2"}, "input_ids is text ('1 2'), expected a list of whole numbers"),
    ({"input_ids": [1, 2.5], "loss_mask": [1, 1]}, "input_ids[1] is a number (2.5), expected a whole number"),
    ({"input_ids": [1, -2], "loss_mask": [1, 1]}, "input_ids[1] is -2; token ids are not negative"),
    ({"input_ids": [1, 2]}, "Add loss_mask or labels"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 entries, but input_ids has 2"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "loss_mask[1] is a number (2), expected 0 or 1"),
    ({"input_ids": [1, 2], "labels": [2, -100]}, "labels[0] is 2, but input_ids[0] is 1. Labels are not shifted"),
    ({"input_ids": [1, 99999], "loss_mask": [1, 1]}, "input_ids[1] is 99999, but the tokenizer has"),
]


@pytest.mark.parametrize(("row", "problem"), MALFORMED, ids=[str(index) for index in range(len(MALFORMED))])
def test_a_malformed_row_is_an_error_naming_file_row_and_field_or_is_counted(make_tokenizer, row, problem):
    tokenizer = make_tokenizer("chatml")
    good = {
        "messages": {"messages": CHAT},
        "prompt": {"prompt": "a", "completion": "b"},
        "instruction": {"instruction": "a", "output": "b"},
        "input_ids": {"input_ids": [1, 2], "labels": [-100, 2]},
    }[next(iter(row))]
    with pytest.raises(DataError, match=re.escape(problem)) as error:
        encode(tokenizer, good, row)
    assert str(error.value).startswith("rows.jsonl:2: ")
    assert encode(tokenizer, good, row, on_bad_row="skip")[1] == Dropped(1, "malformed_row")


def test_a_missing_field_names_the_column_as_the_file_does(make_tokenizer):
    with pytest.raises(DataError) as error:
        encode(make_tokenizer("chatml"), {"chat": CHAT}, {"chats": CHAT}, columns={"messages": "chat"})
    assert str(error.value).startswith("rows.jsonl:2: chat is missing. Did you mean 'chats'? The row has: chats.")


def test_messages_that_the_template_refuses_are_a_malformed_row(make_tokenizer):
    tokenizer = make_tokenizer("system_in_last_user")
    with pytest.raises(
        DataError,
        match=r"^rows\.jsonl:1: messages are refused by the chat template of .*: Roles must alt.*chat_template`",
    ):
        encode(tokenizer, {"messages": [CHAT[0], *CHAT]})


def test_chat_rows_without_chat_template_name_the_setting_even_when_bad_rows_are_skipped(make_tokenizer):
    with pytest.raises(DataError, match=r"rows\.jsonl:1: chat rows need a chat template.*model\.chat_template: path"):
        encode(make_tokenizer(), {"messages": CHAT}, on_bad_row="skip")


def test_a_slow_tokenizer_is_refused(make_tokenizer, monkeypatch):
    tokenizer = make_tokenizer("chatml")
    monkeypatch.setattr(type(tokenizer), "is_fast", property(lambda self: False))
    with pytest.raises(ModelError, match="is a slow tokenizer"):
        encode(tokenizer, {"messages": CHAT})


def test_prompt_and_reference_of_a_conversation_split_at_its_last_answer(make_tokenizer):
    tokenizer = make_tokenizer("qwen3")
    row = {"messages": [*CHAT, {"role": "user", "content": "how"}, {"role": "assistant", "content": "good"}]}
    example = prompt_and_reference(row, HfDatasetConfig(path="x"), tokenizer, data())
    assert example.reference_text == "good"
    assert example.prompt_text.endswith("<|im_start|>user\nhow<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(example.prompt_ids) == example.prompt_text


def test_prompt_and_reference_of_plain_text_add_bos_but_never_the_end(make_tokenizer):
    tokenizer = make_tokenizer(adds_bos=True, adds_eos=True)
    row = {"prompt": "hello", "completion": " fine"}
    example = prompt_and_reference(row, HfDatasetConfig(path="x"), tokenizer, data())
    assert (example.prompt_text, example.reference_text) == ("hello", " fine")
    assert tokenizer.decode(example.prompt_ids) == "<|begin|>hello"


def test_prompt_and_reference_refuse_pretokenized_rows_with_their_place(make_tokenizer):
    row = {"input_ids": [1, 2], "labels": [-100, 2]}
    with pytest.raises(DataError, match=r"^e\.jsonl:4: input_ids holds token ids; answers cannot be generated"):
        prompt_and_reference(row, HfDatasetConfig(path="x"), make_tokenizer(), data(), location="e.jsonl:4")


def test_a_prompt_over_max_length_stops_the_run_only_when_too_long_says_so(make_tokenizer):
    row = {"prompt": "hello world " * 20, "completion": "x"}
    config, tokenizer = HfDatasetConfig(path="x"), make_tokenizer()
    assert len(prompt_and_reference(row, config, tokenizer, data(max_length=8)).prompt_ids) > 8
    with pytest.raises(DataError, match=r"^e:1: the prompt has \d+ tokens, over data.max_length: 8\. Raise"):
        prompt_and_reference(row, config, tokenizer, data(max_length=8, too_long="error"), location="e:1")


def test_examples_pass_over_malformed_rows_when_told_to(make_tokenizer):
    rows = ListDataset([{"prompt": "a", "completion": "b"}, {"prompt": 7}, {"prompt": "c", "completion": "d"}])
    tokenizer = make_tokenizer()
    skipping = DatasetToTokenize(rows, HfDatasetConfig(path="x", format="prompt_completion", on_bad_row="skip"))
    assert [example.reference_text for _, example in read_examples(skipping, tokenizer, data())] == ["b", "d"]
    strict = DatasetToTokenize(rows, HfDatasetConfig(path="x", format="prompt_completion"))
    with pytest.raises(DataError, match=r"^rows\.jsonl:2: prompt is a number"):
        list(read_examples(strict, tokenizer, data()))


def test_a_column_name_with_dots_goes_into_objects():
    row = {"question": "2+2=", "reward_model": {"ground_truth": "4"}, "a.b": "whole name"}
    view = RowView(row, {"completion": "reward_model.ground_truth", "prompt": "a.b", "tools": "reward_model.other"})
    assert (view.get("completion"), view.require("prompt"), view.get("tools")) == ("4", "whole name", None)
    assert "completion" in view
    assert "tools" not in view
    wrong = RowView(row, {"completion": "reward_model.ground_truht"})
    with pytest.raises(BadRowError, match=r"reward_model\.ground_truht is missing\. Did you mean 'ground_truth'"):
        wrong.require("completion")


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_dotted_columns_serve_samples_prompts_and_pairs(tmp_path, make_tokenizer, suffix):
    row = {"question": {"text": "2+2="}, "reward_model": {"ground_truth": "4", "wrong": "5"}}
    path = tmp_path / f"rows.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row), encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    tokenizer = make_tokenizer()
    columns = {"prompt": "question.text", "completion": "reward_model.ground_truth"}
    config = HfDatasetConfig(path=str(path), columns=columns)
    data = DataConfig(train=(config,))
    source = DatasetToTokenize(HfDataset(config), config)
    encoder = RowEncoder(source, tokenizer, data)
    assert encoder.format == "prompt_completion"
    [sample] = encoder.encode([0])
    assert tokenizer.decode(sample.tokens) == "2+2=4<|end|>"
    prompts = HfDatasetConfig(
        path=str(path), columns={"prompt": "question.text", "reference": "reward_model.ground_truth"}
    )
    question = prompt_and_reference(source.dataset[0], prompts, tokenizer, data)
    assert (question.prompt_text, question.reference_text) == ("2+2=", "4")
    pairs = HfDatasetConfig(
        path=str(path),
        columns={"prompt": "question.text", "chosen": "reward_model.ground_truth", "rejected": "reward_model.wrong"},
    )
    for side, answer in (("chosen", "4"), ("rejected", "5")):
        [sample] = RowEncoder(side_of(DatasetToTokenize(HfDataset(pairs), pairs), side), tokenizer, data).encode([0])
        assert tokenizer.decode(sample.tokens) == f"2+2={answer}<|end|>"


def test_a_lone_column_of_text_is_offered_as_raw_text():
    with pytest.raises(DataError, match=r"Rename columns with `columns: \{text: body\}`"):
        detect_format(HfDatasetConfig(path="x"), {"id": 3, "body": "Once upon a time"})


def test_text_that_is_a_number_says_how_to_name_another_column(make_tokenizer):
    with pytest.raises(DataError, match=r"id is a number \(3\), expected text\. .*`columns: \{text: NAME\}`"):
        encode(make_tokenizer(None), {"id": 3}, format="text", columns={"text": "id"})


def opened(tmp_path, *rows, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    registry = load_config({"model": {"path": "m"}, "data": {"train": str(path)}, "steps": 1}).host.registry
    return open_datasets([HfDatasetConfig(path=str(path), **settings)], registry)


def test_a_column_that_no_row_has_is_an_error_with_the_nearest_name(tmp_path):
    row = {"messages": CHAT, "meta": {"instructions": "Be brief."}}
    with pytest.raises(DataError) as error:
        opened(tmp_path, row, row, columns={"system": "meta.instrutions"})
    assert str(error.value) == (
        "rows: columns.system is 'meta.instrutions', and none of the first 2 rows has such a column. Did you mean "
        "'meta.instructions'? They have: messages, meta, meta.instructions. Correct the name, or remove the line."
    )


def test_a_column_that_only_a_later_row_has_is_none(tmp_path):
    [data] = opened(tmp_path, {"messages": CHAT}, {"messages": CHAT, "hint": "x"}, columns={"system": "hint"})
    assert len(data.dataset) == 2


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"question": "a", "answer": "b", "lang": "en"}, "instruction: question, output: answer"),
        ({"Question": "a", "Answer": "b"}, "instruction: Question, output: Answer"),
        ({"prompt": "a", "response": "b"}, "completion: response"),
        ({"instruction": "a", "response": "b"}, "output: response"),
        # As an instruction's second part, `input` would be read once more.
        ({"input": "a", "output": "b"}, "prompt: input, completion: output"),
        ({"Prompt": "a", "Completion": "b"}, "prompt: Prompt, completion: Completion"),
        ({"id": "a", "dialog": [{"role": "user", "content": "a"}]}, "messages: dialog"),
    ],
)
def test_columns_that_are_called_otherwise_get_a_renaming_that_is_read(row, columns):
    with pytest.raises(DataError) as error:
        detect_format(HfDatasetConfig(path="x"), row)
    assert f"Rename columns with `columns: {{{columns}}}`" in str(error.value)
    renamed = dict(pair.split(": ") for pair in columns.split(", "))
    assert detect_format(HfDatasetConfig(path="x", columns=renamed), row)


def test_columns_that_nobody_can_guess_are_left_to_the_user():
    with pytest.raises(DataError, match=r"columns: \{instruction: NAME, output: NAME\}"):
        detect_format(HfDatasetConfig(path="x"), {"data": {"a": 1}, "tags": ["a"]})


def test_a_question_alone_is_a_prompt_where_answers_are_generated():
    with pytest.raises(DataError, match=r"`columns: \{instruction: question\}`"):
        detect_format(HfDatasetConfig(path="x"), {"question": "a", "level": "hard"}, needs_answer=False)


def test_a_misspelled_key_of_columns_is_told_from_an_exchange_of_key_and_value(make_tokenizer):
    with pytest.raises(DataError, match=r"columns\.promt is not a column.*Did you mean 'prompt'\?"):
        encode(make_tokenizer("chatml"), {"prompt": "a", "completion": "b"}, columns={"promt": "prompt"})
    with pytest.raises(DataError, match=r"write `columns: \{prompt: question\}`"):
        encode(make_tokenizer("chatml"), {"question": "a", "completion": "b"}, columns={"question": "prompt"})
