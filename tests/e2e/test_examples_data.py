"""The example data and the tiny model can be made again, byte for byte."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.processes

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = ("sort_train.jsonl", "sort_eval.jsonl")


def run_script(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, str(EXAMPLES / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout


def rows_of(name: str) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for line in (EXAMPLES / "data" / name).read_text(encoding="utf-8").splitlines():
        question, answer = json.loads(line)["messages"]
        assert (question["role"], answer["role"]) == ("user", "assistant")
        rows.append((question["content"], answer["content"]))
    return rows


def test_the_data_is_reproducible_and_every_answer_is_the_prompts_seven_digits_in_order(tmp_path: Path) -> None:
    run_script("data/make_sort_data.py", tmp_path)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (EXAMPLES / "data" / name).read_bytes()
        for prompt, answer in rows_of(name):
            digits = prompt.removeprefix("Sort: ").split(" ")
            assert len(digits) == 7
            assert answer.split(" ") == sorted(digits)


def test_preference_pairs_are_reproducible_and_differ_in_one_exchange(tmp_path: Path) -> None:
    run_script("data/make_preference_data.py", tmp_path)
    sort_prompts = {prompt for name in FILES for prompt, _ in rows_of(name)}
    prompts: list[str] = []
    for name, count in (("sort_pairs_train.jsonl", 2_000), ("sort_pairs_eval.jsonl", 400)):
        content = (tmp_path / name).read_bytes()
        assert content == (EXAMPLES / "data" / name).read_bytes()
        assert len(content.splitlines()) == count
        for line in content.splitlines():
            (prompt,), (chosen,), (rejected,) = (json.loads(line)[side] for side in ("prompt", "chosen", "rejected"))
            prompts.append(prompt["content"])
            right, wrong = chosen["content"].split(" "), rejected["content"].split(" ")
            assert right == sorted(prompt["content"].removeprefix("Sort: ").split(" "))
            assert sorted(wrong) == right
            assert sum(a != b for a, b in zip(right, wrong, strict=True)) == 2
    assert len(set(prompts)) == len(prompts)
    assert set(prompts) <= sort_prompts


def test_the_tiny_model_is_one_of_the_hubs_kind_and_the_same_for_one_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    assert str(folder) in run_script("make_tiny_model.py", folder, "--seed", "3")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.num_parameters() < 500_000
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    messages = [{"role": "user", "content": "Sort: 2 1"}, {"role": "assistant", "content": "1 2"}]
    encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, trained in pairs if trained]) == "1 2<|im_end|>"
    monkeypatch.setattr(sys, "argv", ["make_tiny_model.py", str(tmp_path / "again"), "--seed", "3"])
    with torch.random.fork_rng():
        runpy.run_path(str(EXAMPLES / "make_tiny_model.py"), run_name="__main__")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()
