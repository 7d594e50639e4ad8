"""The bundled chat templates write the formats that their models' makers have published."""

from __future__ import annotations

from pathlib import Path

import pytest

from spurline.config.run_config import CHAT_TEMPLATES, DataConfig, ModelConfig
from spurline.errors import DataError, ModelError
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_text import tokenizer as tokenizers
from spurline_text.chats.chat import ChatRenderer
from spurline_text.configs import HfDatasetConfig
from spurline_text.encoding import RowEncoder
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.testing.tokenization_contract import ListDataset
from spurline_text.tokenizer import load_tokenizer, template_notes

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "2+2?"}
ANSWER = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
}
RESULT = {"role": "tool", "content": "4"}

PUBLISHED = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n"
    "<|im_start|>assistant\n4<|im_end|>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n2+2?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n4<|eot_id|>",
    "gemma": "<s><start_of_turn>user\nBe brief.\n\n2+2?<end_of_turn>\n<start_of_turn>model\n4<end_of_turn>\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\n2+2?</s>\n<|assistant|>\n4</s>\n",
}
PROMPTS = {
    "chatml": "<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>model\n",
    "zephyr": "<|assistant|>\n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def named(folder: Path, name: str) -> ChatRenderer:
    return ChatRenderer(load_tokenizer(ModelConfig(path=str(folder), chat_template=name)))


def test_there_is_a_file_for_each_name_and_no_other() -> None:
    files = (Path(tokenizers.__file__).parent / "chats" / "templates").iterdir()
    assert sorted(file.stem for file in files) == sorted(CHAT_TEMPLATES) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_a_conversation_is_written_as_the_format_has_it(folder: Path, name: str) -> None:
    renderer = named(folder, name)
    assert renderer.render([SYSTEM, USER, ANSWER], None) == PUBLISHED[name]
    prompt = renderer.render([SYSTEM, USER], None, add_generation_prompt=True)
    assert prompt.endswith(PROMPTS[name])
    assert PUBLISHED[name].startswith(prompt)


def test_chatml_writes_tools_calls_results_and_reasoning(folder: Path) -> None:
    thinking = {**ANSWER, "reasoning_content": "two and two"}
    text = named(folder, "chatml").render([SYSTEM, USER, CALL, RESULT, thinking], [TOOL])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "add", "parameters": {}}}\n</tools>' in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\ntwo and two\n</think>\n\n4<|im_end|>\n"
    ) in text


def test_llama3_writes_tools_calls_and_results(folder: Path) -> None:
    text = named(folder, "llama3").render([USER, CALL, RESULT, ANSWER], [TOOL])
    assert '{"type": "function", "function": {"name": "add", "parameters": {}}}<|eot_id|>' in text
    assert (
        '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "add", "parameters": {"a": 2}}<|eot_id|>'
        "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"
    ) in text


@pytest.mark.parametrize("name", CHAT_TEMPLATES)
def test_rows_are_trained_with_every_template_or_refused_where_the_format_has_no_tools(folder: Path, name: str) -> None:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=name))
    config = HfDatasetConfig(path="rows.jsonl")

    def encode(row):
        source = DatasetToTokenize(ListDataset([row]), config)
        return RowEncoder(source, tokenizer, DataConfig(train=(config,), train_on="all_assistants")).encode([0])

    [sample] = encode({"messages": [SYSTEM, USER, ANSWER, USER, ANSWER]})
    trained = tokenizer.decode([t for t, on in zip(sample.tokens, sample.loss_mask, strict=True) if on])
    assert trained.replace(" ", "").count("4") == 2
    with_tools = {"messages": [USER, CALL, RESULT, ANSWER], "tools": [TOOL]}
    if name in ("chatml", "llama3"):
        assert encode(with_tools)[0].ignored == ()
    else:
        with pytest.raises(DataError, match="has no role tool"):
            encode(with_tools)
        with pytest.raises(DataError, match=f"tools: the chat template {name} leaves this out"):
            encode({"messages": [USER, ANSWER], "tools": [TOOL]})


def test_an_unknown_name_is_told_the_nearest(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"chat_template: chatlm cannot be read .*Did you mean 'chatml'.*llama3"):
        load_tokenizer(ModelConfig(path=str(folder), chat_template="chatlm"))


def test_markers_that_the_tokenizer_cuts_are_a_warning_with_templates_that_fit(folder: Path) -> None:
    model = ModelConfig(path=str(folder), chat_template="llama3")
    tokenizer = load_tokenizer(model)
    [note] = template_notes(model, tokenizer)
    assert note.startswith(
        "model.chat_template: llama3 writes <|end_header_id|>, <|eot_id|>, <|start_header_id|>, which"
    )
    assert "templates that fit it: chatml, zephyr" in note
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]}
    )
    assert template_notes(model, tokenizer) == []
    for template in (None, "chatml", "zephyr"):
        fitting = ModelConfig(path=str(folder), chat_template=template)
        assert template_notes(fitting, load_tokenizer(fitting)) == []
