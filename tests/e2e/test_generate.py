"""`spurline generate` answers what an export would answer, to prompts from arguments, files and standard input."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_helpers import Config, Spurline, train, wait_for, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer
from warm_children import WarmRuns

from spurline.config.run_config import ModelConfig
from spurline.terminal import printable
from spurline_models.answering import answers as answering


@pytest.fixture
def run_dir(base_config: Config) -> Path:
    """A run that keeps its best and its last checkpoint."""
    base_config["data"]["eval"] = base_config["data"]["train"]
    base_config["backend"]["lora"] = {"rank": 4}
    kept = {"every_steps": 1, "every_minutes": None, "keep_best": "eval/loss"}
    return train(base_config, steps=2, evaluation={"every_steps": 1}, checkpoint=kept).run_dir


def answers(out: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.splitlines()]


def greedy(folder: Path, text: str, count: int) -> str:
    """Return the answer of transformers with an exported model."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        out = model.generate(**ids, do_sample=False, max_new_tokens=count)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_run_answers_what_its_export_answers(spurline: Spurline, run_dir: Path, tmp_path: Path) -> None:
    for checkpoint in ("latest", "best"):
        chosen = ("--checkpoint", checkpoint)
        assert spurline("export", run_dir, tmp_path / checkpoint, *chosen)[0] == 0
        code, found, err = spurline("generate", run_dir, "say 3", "--json", "--max-new-tokens", "8", *chosen)
        assert code == 0, err
        [answer] = answers(found)
        assert answer["prompt"] == "say 3"
        assert answer["response"] == greedy(tmp_path / checkpoint, "say 3", 8)
        assert (answer["finish_reason"], answer["tokens"]) in (("length", 8), ("stop", answer["tokens"]))
        assert "greedy, at most 8 new tokens" in err
    (run_dir / "checkpoints").rename(tmp_path / "gone")
    code, _, err = spurline("generate", run_dir, "x")
    assert (code != 0, "checkpoint" in err) == (True, True)


def test_prompts_come_from_arguments_files_and_standard_input(
    spurline: Spurline, spurline_tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("generate", spurline_tiny_model, "--json", "--max-new-tokens", "4")
    file = tmp_path / "prompts.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": "say 3"}, {"role": "assistant", "content": "not read"}]},
        {"prompt": "say 4", "completion": "5"},
        {"instruction": "say 5", "output": "6"},
    ]
    write_rows(file, rows)
    code, out, err = spurline(*ask, "--file", file)
    assert code == 0, err
    assert [found["prompt"] for found in answers(out)][:2] == ["say 3", "say 4"]
    code, again, _ = spurline(*ask, "say 3")
    assert answers(again)[0]["response"] == answers(out)[0]["response"]
    monkeypatch.setattr("sys.stdin", io.StringIO("say 3\n"))
    assert answers(spurline(*ask)[1]) == answers(again)
    raw = answers(spurline(*ask, "say 3", "--raw")[1])[0]
    with_system = answers(spurline(*ask, "say 3", "--system", "Be brief.")[1])[0]
    assert len({raw["response"], with_system["response"], answers(again)[0]["response"]}) > 1


def test_columns_of_a_table_are_named_by_an_option(
    spurline: Spurline, spurline_tiny_model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("question,answer\nsay 3,3\nsay 4,4\n")
    ask = ("generate", spurline_tiny_model, "--json", "--max-new-tokens", "2", "--file", file)
    code, out, err = spurline(*ask, "--column", "prompt=question")
    assert code == 0, err
    assert [found["prompt"] for found in answers(out)] == ["say 3", "say 4"]
    code, out, err = spurline(*ask)
    assert (code, out) == (2, "")
    assert re.search(r"rows.csv row 0: the columns \(answer, question\) .*--column prompt=NAME", err), err
    code, _, err = spurline(*ask, "--column", "prompt=quest")
    assert (code, "Did you mean 'question'?" in err) == (2, True), err


@pytest.mark.processes
def test_ctrl_c_ends_an_answer_half_way_and_keeps_those_before_it(
    warm_runs: WarmRuns, spurline_tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    file, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    write_rows(file, [{"prompt": f"say {number}"} for number in range(500)])
    words = ("generate", spurline_tiny_model, "--file", file, "--json", "--max-new-tokens", "100")
    process = warm_runs.start(*words, output=output)
    wait_for(lambda: output.is_file() and output.read_text().count('"tokens"') >= 2, "two answers")
    before = output.read_text()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(30) == 130
    # Errors go to the same place here.
    assert output.read_text().startswith(before)
    *lines, end = output.read_text().splitlines()[1:]
    assert end == "Interrupted."
    assert [json.loads(line)["prompt"] for line in lines] == [f"say {number}" for number in range(len(lines))]
    assert 2 <= len(lines) < 500
    assert [path for path in (tmp_path / "scratch").iterdir() if not path.name.startswith("torchinductor")] == []


def test_a_run_that_samples_is_asked_as_it_samples_and_a_seed_repeats_it(spurline: Spurline, rl_config: Config) -> None:
    rl_config["source"]["sampling"] = {"temperature": 0.7, "max_new_tokens": 6}
    train(rl_config, steps=1)
    ask = ("generate", rl_config["run_dir"], "say 3", "--json", "-n", "3")
    code, out, err = spurline(*ask)
    assert code == 0, err
    assert "temperature 0.7, at most 6 new tokens" in err
    assert len(answers(out)) == 3
    assert spurline(*ask)[1] == out
    assert spurline(*ask, "--seed", "1")[1] != out


def test_a_conversation_goes_on_until_it_begins_anew_or_ends(
    spurline: Spurline, spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: Iterator[str] = iter(["say 3", "say 4", "/reset", "say 3"])
    asked: list[list[str]] = []
    original = answering.Prompts.of_messages

    def noted(prompts: answering.Prompts, messages: Any, tools: Any = None) -> list[int]:
        asked.append([message["content"] for message in messages])
        return original(prompts, messages, tools)

    def written(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    monkeypatch.setattr("builtins.input", written)
    monkeypatch.setattr(answering.Prompts, "of_messages", noted)
    code, out, err = spurline("generate", spurline_tiny_model, "--max-new-tokens", "3")
    assert code == 0, err
    assert [len(messages) for messages in asked] == [1, 3, 1]
    assert asked[1][0] == "say 3"
    # The first answer is in the second question, and both first ones are equal.
    assert out.count(printable(asked[1][1]).strip() or "\n") >= 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["say 3", "-n", "2"], r"Give --temperature"),
        (["say 3", "--top-p", "2"], r"--top-p"),
        (["say 3", "--checkpoint", "best"], r"--checkpoint is for runs"),
        (["say 3", "--raw", "--system", "x"], r"--system is for conversations"),
        (["say 3 " * 2000], r"the prompt has [\d,]+ tokens, and prompt and answer together may have at most [\d,]+"),
        (["\udcff"], r"not Unicode text"),
        (["say 3", "--temperature", "-1"], r"--temperature"),
        (["--file", "nowhere.jsonl"], r"nowhere.jsonl: no such file"),
        (["--column", "prompt=question", "say 3"], r"Give --file as well"),
        (["--file", "nowhere.jsonl", "--column", "question"], r"--column takes NAME=COLUMN"),
    ],
)
def test_what_cannot_be_answered_says_why(
    spurline: Spurline, spurline_tiny_model: Path, words: list[str], message: str
) -> None:
    code, _, err = spurline("generate", spurline_tiny_model, *words, "--max-new-tokens", "2")
    assert code == 2
    assert re.search(message, err)


def test_a_mistyped_place_is_told_before_anything_is_loaded(
    spurline: Spurline, spurline_tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "nose").mkdir(parents=True)
    code, _, err = spurline("generate", tmp_path / "runs" / "nope", "x")
    assert (code, "Did you mean 'nose'?" in err) == (2, True), err
    assert spurline("generate", tmp_path, "x")[0] == 2
    monkeypatch.setattr(answering, "opened", lambda *_: pytest.fail("loaded"))
    code, _, err = spurline("generate", "any", "--file", tmp_path / "nope.jsonl")
    assert (code, "nope.jsonl: no such file" in err) == (2, True), err


def test_letters_stay_what_they_are_in_json_and_commands_to_a_terminal_do_not(
    spurline: Spurline, spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "answer", lambda *_: [answering.Answer("\x9b31mBjørn", 1, "stop")])
    _, out, _ = spurline("generate", spurline_tiny_model, "Åse", "--json")
    assert out.startswith('{"prompt": "Åse", "response": "\\u009b31mBjørn", ')
    assert answers(out)[0]["response"] == "\x9b31mBjørn"
    monkeypatch.setattr(answering, "answer", lambda *_: [answering.Answer("\x1b[31mred", 1, "stop")])
    _, out, _ = spurline("generate", spurline_tiny_model, "say 3")
    assert out == "\\x1b[31mred\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "rows.jsonl:2: begins with an assistant"),
        ('{"prompt": "\\ud800"}', "rows.jsonl:2: "),
        ("[" * 100_000, "rows.jsonl:2: not valid JSON"),
        (json.dumps({"prompt": "say 3 " * 2000}), "tokens, and prompt and answer together may have at most"),
    ],
    ids=["no question", "half a pair", "deep", "long"],
)
def test_a_bad_row_is_named_before_anything_is_answered(
    spurline: Spurline, spurline_tiny_model: Path, tmp_path: Path, row: str, message: str
) -> None:
    file = tmp_path / "rows.jsonl"
    # The first row is one line: what Unicode calls a line separator ends none, nor is a byte order mark a part of it.
    file.write_text("\ufeff" + json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False) + f"\n{row}\n", encoding="utf-8")
    code, out, err = spurline("generate", spurline_tiny_model, "--file", file, "--max-new-tokens", "2")
    assert (code, out) == (2, "")
    assert "rows.jsonl:2: " in err
    assert message in err


def test_an_answer_ends_with_a_stop_text(spurline_tiny_model: Path) -> None:
    target = answering.open_model(ModelConfig(path=str(spurline_tiny_model)), lambda _: None)
    prompt = answering.Prompts(target, None, raw=True).of_text("say 3")
    [free] = answering.answer(target, prompt, answering.Sampling(max_new_tokens=6))
    assert (free.finish_reason, free.tokens) == ("length", 6)
    sampling = answering.Sampling(max_new_tokens=6, stop=("nowhere", free.text[0]))
    [ended] = answering.answer(target, prompt, sampling)
    assert (ended.finish_reason, ended.tokens) == ("stop", 1)
