"""A chat template that leaves out what a row says is found, whatever its rows look like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenized_rows import tokenized

from spurline.config.run_config import DataConfig
from spurline.data.token_store import describe, summarize
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_preference.rows import side_of
from spurline_text.configs import HfDatasetConfig, SequentialTokenizationConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.prompts import prompt_and_reference
from spurline_text.tokenization import SequentialTokenization

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
ASKED = {"role": "user", "content": "2 + 2? call add"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
PLAIN = {"messages": [ASKED, {"role": "assistant", "content": "4"}]}

WITHOUT_SYSTEM = """{%- for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def read(tmp_path: Path, rows, tokenizer, kind="sequential", **data):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return tokenized(path, tokenizer, kind, **data)


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
@pytest.mark.parametrize(
    ("row", "place"),
    [
        ({**PLAIN, "tools": [TOOL]}, "tools: "),
        ({"messages": [ASKED, CALL]}, r"messages\[1\]\.tool_calls\[0\]: "),
        (
            {"messages": [ASKED, {"role": "assistant", "content": "4", "reasoning_content": "two and two"}]},
            r"messages\[1\]\.reasoning_content: ",
        ),
    ],
)
def test_what_the_template_leaves_out_is_an_error_that_names_row_field_and_template(
    tmp_path, make_tokenizer, row, place, kind
):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template_source = "my.jinja"
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: {place}the chat template my\.jinja leaves this out.*chatml"):
        read(tmp_path, [PLAIN, row], tokenizer, kind)


@pytest.mark.parametrize("said", ["Answer in French.", "add"], ids=["words of its own", "words that another has too"])
def test_a_message_whose_role_the_template_leaves_out_is_an_error(tmp_path, make_tokenizer, said):
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = WITHOUT_SYSTEM
    row = {"messages": [{"role": "system", "content": said}, *PLAIN["messages"]]}
    with pytest.raises(DataError, match=r"rows\.jsonl:1: messages\[0\] \(role system\): the chat template"):
        read(tmp_path, [row], tokenizer)


@pytest.mark.parametrize("kind", ["sequential", "parallel"])
def test_with_warn_the_rows_are_trained_on_and_counted(tmp_path, make_tokenizer, kind):
    rows = [PLAIN, {**PLAIN, "tools": [TOOL]}, {"messages": [ASKED, CALL, *PLAIN["messages"]], "tools": [TOOL]}]
    made = read(tmp_path, rows, make_tokenizer("chatml"), kind, on_ignored="warn")
    assert len(made.store) == 3
    assert made.ignored == {"tools": 2, "tool calls": 1}
    lines = describe("train", summarize(made))
    assert f"  the chat template leaves out: tools of 2 rows (first: {tmp_path}/rows.jsonl:2)" in lines


def test_a_row_that_is_cut_into_several_samples_is_counted_once(tmp_path, make_tokenizer):
    rows = [{"messages": [ASKED, {"role": "assistant", "content": "four " * 40}], "tools": [TOOL]}]
    made = read(tmp_path, rows, make_tokenizer("chatml"), on_ignored="warn", max_length=32, too_long="split")
    assert len(made.store) > 2
    assert made.ignored == {"tools": 1}


def test_a_template_that_writes_everything_is_never_accused(tmp_path, make_tokenizer):
    rows = [
        {**PLAIN, "tools": [TOOL]},
        {"messages": [ASKED, CALL, {"role": "tool", "content": "4"}, PLAIN["messages"][1]], "tools": [TOOL]},
        {"messages": [ASKED, {"role": "assistant", "content": "4", "reasoning_content": "two and two"}]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                ASKED,
                {"role": "assistant", "content": "4", "reasoning_content": "left out of the history on purpose"},
                ASKED,
                {"role": "assistant", "content": "4"},
            ]
        },
    ]
    made = read(tmp_path, rows, make_tokenizer("qwen3"))
    assert (len(made.store), made.ignored, made.dropped) == (4, {}, {})


def test_preference_rows_and_prompts_are_looked_at_too(tmp_path, make_tokenizer):
    tokenizer = make_tokenizer("chatml")
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"prompt": [ASKED], "chosen": [CALL], "rejected": [PLAIN["messages"][1]], "tools": [TOOL]}),
        encoding="utf-8",
    )
    config = HfDatasetConfig(path=str(path))
    data = DataConfig(train=(config,))
    source = side_of(DatasetToTokenize(HfDataset(config), config), "chosen")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: messages\[1\]\.tool_calls\[0\], tools: "):
        SequentialTokenization(SequentialTokenizationConfig(), tokenizer=tokenizer, data=data).tokenize([source])
    with pytest.raises(DataError, match=r"row 3: tools: the chat template"):
        prompt_and_reference({**PLAIN, "tools": [TOOL]}, config, tokenizer, data, location="row 3")
