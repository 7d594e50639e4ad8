"""`spurline data` shows what is trained, and escapes hostile text."""

from __future__ import annotations

import io
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Config, Spurline, write_rows

from spurline.config.loading import load_config
from spurline_planning.data_preview.rows import ShownData, ShownSequence, show_data
from spurline_planning.data_preview.terminal import print_data

HOSTILE = "\x1b[31m\x9b<script>alert('x')</script> & \u202e😀 ⟦"


def give_rows(config: Config, *rows: dict[str, Any]) -> None:
    """Train on these rows."""
    config["data"]["train"] = str(write_rows(Path(config["run_dir"]).parent / "rows.jsonl", rows))
    if "batch_size" in config:
        config["batch_size"] = len(rows)


def show(config: Config, rows: int = 3) -> ShownData:
    return show_data(load_config(config), rows, None)


def text_of(sequence: ShownSequence, *, trained: bool) -> str:
    return "".join(
        piece for piece, weight in zip(sequence.pieces, sequence.weights, strict=True) if bool(weight) == trained
    )


def chat(*turns: tuple[str, str]) -> Config:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_a_conversation_shows_what_is_trained_of_it(spurline: Spurline, base_config: Config) -> None:
    give_rows(base_config, chat(("system", "Be brief."), ("user", "ping"), ("assistant", "pong")))
    code, out, err = spurline("data", base_config)
    assert (code, err) == (0, "")
    assert "⟦pong<|im_end|>⟧" in out
    assert "trained tokens are in ⟦ ⟧" in out
    [row] = show(base_config, rows=1).rows
    [sequence] = row.sequences
    assert f"{len(sequence.pieces)} tokens, " in sequence.heading
    assert text_of(sequence, trained=True) == "pong<|im_end|>"
    assert {*itertools.compress(sequence.pieces, sequence.special)} == {"<|im_start|>", "<|im_end|>"}
    code, out, _ = spurline("plan", base_config)
    assert code == 0
    [line] = [line for line in out.splitlines() if "trained tokens in ⟦ ⟧" in line]
    assert "| ⟦pong<|im_end|>⟧" in out.split(line)[1].split("batches:")[0]


def test_sequences_that_share_a_row_stand_apart(base_config: Config) -> None:
    data = show(base_config, rows=5)
    assert sum(len(row.sequences) for row in data.rows) == 5
    row = data.rows[0]
    assert len(row.sequences) > 1
    last = data.rows[-1]
    assert re.search(rf": {len(last.sequences)} of the \d+ sequences that share its \d+ token positions", last.title)
    assert all(text_of(sequence, trained=True).endswith("<|im_end|>") for sequence in row.sequences)
    assert len({sequence.uid for sequence in row.sequences}) == len(row.sequences)


def test_what_is_cut_and_what_is_left_out_is_said(base_config: Config) -> None:
    base_config["data"] |= {"max_length": 40, "train_on": "all_assistants"}
    give_rows(base_config, chat(("user", "a"), ("assistant", "b" * 60)), chat(("user", "a" * 60), ("assistant", "b")))
    base_config["batch_size"] = 1
    data = show(base_config, rows=1)
    [sequence] = data.rows[0].sequences
    assert len(sequence.pieces) == 40
    assert any("cut to max_length: 1" in line for line in data.facts)
    assert any("left out: 1 x no_loss_tokens_after_truncation" in line for line in data.facts)


def test_held_out_rows_that_are_trained_on_and_answers_that_are_empty_are_counted(
    base_config: Config, tmp_path: Path
) -> None:
    give_rows(base_config, chat(("user", "a"), ("assistant", "b")), chat(("user", "c"), ("assistant", " ")))
    trained, held_out = Path(base_config["data"]["train"]), tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps(chat(("user", "e"), ("assistant", "b"))) + "\n" + trained.read_text())
    base_config["data"]["eval"] = str(held_out)
    base_config["evaluations"] = {"own": {"name": "loss", "data": str(held_out)}}
    facts = show(base_config).facts
    assert f"  1 rows have an empty answer, which trains the end token alone (first: {trained}:2)" in facts
    shared = [fact for fact in facts if "2 of 3 held-out rows are also training rows" in fact]
    assert len(shared) == 2
    assert all(f"(first: {held_out}:2)" in fact for fact in shared)


def test_only_an_answer_that_is_trained_and_says_nothing_is_empty(base_config: Config) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    untrained = chat(("user", "a"), ("assistant", ""), ("user", "b"), ("assistant", "c"))
    give_rows(base_config, {"messages": [{"role": "user", "content": "a"}, call]}, untrained)
    base_config["model"]["chat_template"] = "chatml"
    assert "empty answer" not in "\n".join(show(base_config).facts)
    base_config["data"]["train_on"] = "all_assistants"
    assert "1 rows have an empty answer" in "\n".join(show(base_config).facts)
    # Nor is an empty line of raw text.
    give_rows(base_config, {"text": "a b"}, {"text": " \n"})
    assert "empty answer" not in "\n".join(show(base_config).facts)


def test_both_answers_of_a_pair_are_shown_and_held_out_pairs_are_compared(base_config: Config, tmp_path: Path) -> None:
    pairs = [{"prompt": "ping", "chosen": "pong", "rejected": answer} for answer in ("pang", "z")]
    give_rows(base_config, *pairs)
    base_config["data"]["eval"] = str(write_rows(tmp_path / "held_out.jsonl", pairs[1:]))
    data = show(base_config | {"source": "preference", "loss": "dpo"})
    assert "1 of 1 held-out rows are also training rows" in "\n".join(data.facts)
    shown = {sequence.kind: text_of(sequence, trained=True) for row in data.rows for sequence in row.sequences}
    assert shown.keys() == {"chosen", "rejected"}
    assert "pong" in shown["chosen"]


def test_held_out_prompts_that_are_trained_on_are_counted(rl_config: Config, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": text}], "number": number} for number, text in enumerate("abcz")]
    give_rows(rl_config, *rows[:3])
    held_out = str(write_rows(tmp_path / "held_out.jsonl", [row | {"number": 9} for row in (rows[3], rows[1])]))
    rl_config["data"]["eval"] = held_out
    rl_config["source"]["held_out"] = {"success": {"reward": "early"}}
    rewards = rl_config["source"]["environment"]["rewards"]
    rl_config["evaluations"] = {
        "tries": {"name": "rollouts", "data": held_out, "success": {"reward": "early"}},
        "greedy": {"name": "answers", "data": held_out, "rewards": rewards},
    }
    shared = [fact for fact in show(rl_config).facts if "1 of 2 held-out rows are also training rows" in fact]
    assert len(shared) == 3
    assert all(f"(first: {held_out}:2)" in fact for fact in shared)


@pytest.mark.parametrize(
    ("row", "settings", "columns"),
    [
        ({"prompt": "ping", "completion": "pong"}, {}, {"instruction": "prompt", "output": "completion"}),
        (
            {"prompt": "ping", "chosen": "pong", "rejected": "pang"},
            {"source": "preference", "loss": "dpo"},
            {"instruction": "prompt"},
        ),
    ],
)
def test_plain_text_for_a_model_of_chats_is_named_unless_it_is_meant(
    base_config: Config, row: dict[str, Any], settings: dict[str, Any], columns: dict[str, str]
) -> None:
    give_rows(base_config, row)
    path = base_config["data"]["train"]
    written = ", ".join(f"{name}: {column}" for name, column in columns.items())
    plain = show(base_config | settings)
    assert f"columns: {{{written}}}" in "\n".join(plain.facts)
    base_config["data"]["train"] = {"path": path, "format": "prompt_completion"}
    meant = show(base_config | settings)
    assert meant.rows == plain.rows
    base_config["data"]["train"] = {"path": path, "columns": columns}
    turns = show(base_config | settings)
    assert "plain text" not in "\n".join((*meant.facts, *turns.facts))
    sequence = turns.rows[0].sequences[0]
    assert text_of(sequence, trained=False).startswith("<|im_start|>user")
    assert text_of(sequence, trained=True).startswith("pong")


def test_a_run_that_generates_shows_prompts_tools_and_answers(rl_config: Config) -> None:
    data = show(rl_config, rows=2)
    [first], [second] = (row.sequences for row in data.rows)
    assert first.kind == "prompt"
    assert text_of(first, trained=False).endswith("<|im_start|>assistant↵\n")
    assert "⟦" not in printed(data), "no prompt is trained"
    assert first.uid != second.uid
    assert "rewards: brevity, early" in first.notes
    assert any(note.startswith("reference answer: ") for note in first.notes)


GUESS = """
class Guess:
    def __init__(self, config, **parts):
        pass

    async def run(self, task, policy):
        return policy.finish({"right": 1.0})
"""


def test_rows_that_only_the_environment_reads_are_shown_by_what_is_known_of_them(
    rl_config: Config, tmp_path: Path
) -> None:
    (tmp_path / "guess.py").write_text(GUESS)
    give_rows(rl_config, {"low": 1, "high": 9}, {"low": 3, "high": 5})
    environment = {"name": "custom", "path": f"{tmp_path}/guess.py:Guess"}
    rl_config["source"] |= {"environment": environment, "reward_weights": {}}
    data = show(rl_config, rows=2)
    assert len(data.rows) == 2
    assert "only the environment reads its columns" in data.rows[0].sequences[0].notes
    text = printed(data)
    assert "0 tokens" not in text
    assert "  | " not in text


def printed(data: ShownData, file: io.StringIO | None = None) -> str:
    file = file or io.StringIO()
    print_data(data, file)
    return file.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_control_character_reaches_a_terminal(base_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    give_rows(base_config, chat(("user", HOSTILE), ("assistant", HOSTILE)))
    data = show(base_config)
    plain = printed(data)
    assert "\x1b" not in plain
    assert "\x9b" not in plain
    assert r"\x1b[31m" in plain
    assert r"\u202e" in plain
    # The line about the marks, and the marks around the answer in each of three steps.
    assert plain.count("⟦") == plain.count("⟧") == 1 + 3
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = printed(data, Terminal())
    assert "\x1b[1;32m" in coloured
    # Only sequences that begin a style.
    assert "\x9b" not in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "32m" not in printed(data, Terminal())


def test_no_weights_are_read(base_config: Config, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(base_config["model"]["path"], model, ignore=shutil.ignore_patterns("*.safetensors"))
    base_config["model"] = {"path": str(model)}
    assert show(base_config, rows=1).rows
