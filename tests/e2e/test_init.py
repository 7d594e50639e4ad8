"""The config that `spurline init` writes plans without problems, and trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from run_helpers import Spurline, train, write_rows

from spurline import load_config
from spurline.plugins.official import install_command
from spurline_planning.first_config import command, init_command
from spurline_planning.first_config.command import Options, config_text
from spurline_planning.first_config.survey import DataFacts, ModelFacts
from spurline_text.rows.usual_columns import guessed_columns

CHAT = {"messages": [{"role": "user", "content": "say 1"}, {"role": "assistant", "content": "1"}]}
PAIR = {
    "prompt": [{"role": "user", "content": "say 1"}],
    "chosen": [{"role": "assistant", "content": "1"}],
    "rejected": [{"role": "assistant", "content": "2"}],
}


def rows(path: Path, row: dict[str, Any], count: int = 40) -> Path:
    return write_rows(path, [{**row, "number": number} for number in range(count)])


@pytest.fixture
def init(spurline: Spurline, spurline_tiny_model: Path, tmp_path: Path) -> Spurline:
    """Run `spurline init run.yaml` in an empty folder with the tiny model, this data and these words."""

    def run(data: object, *words: object, file: str = "run.yaml", plan: bool = False) -> tuple[int, str, str]:
        given = ("--model", spurline_tiny_model, "--data", data, *([] if plan else ["--no-plan"]))
        return spurline("init", tmp_path / file, *given, *words)

    return run


@pytest.mark.parametrize(
    ("row", "words", "expected"),
    [
        (CHAT, (), {"source": "sft", "loss": "cross_entropy", "task": "conversations"}),
        (
            {"prompt": "one", "completion": "two"},
            ("--lora", "--steps", "3"),
            {"source": "sft", "steps": 3, "rank": 16, "columns": {"instruction": "prompt", "output": "completion"}},
        ),
        (
            {"question": "one", "chosen": "two", "rejected": "three"},
            (),
            {"source": "preference", "columns": {"instruction": "question"}},
        ),
        ({"text": "one two three"}, ("--epochs", "2"), {"source": "sft", "epochs": 2, "task": "plain text"}),
        (PAIR, (), {"source": "preference", "loss": "dpo", "task": "preference pairs"}),
        (CHAT, ("--task", "rl"), {"source": "rollouts", "loss": "ppo", "task": "prompts of conversations"}),
        (
            {"messages": CHAT["messages"][:1]},
            ("--reward", "exact_match", "--no-lora"),
            {"source": "rollouts", "task": "prompts of conversations"},
        ),
        (CHAT, ("--task", "async"), {"source": "async_rollouts", "loss": "ppo", "task": "prompts of conversations"}),
        (
            {"question": "one", "answer": "two", "system_prompt": "three"},
            (),
            {"source": "sft", "columns": {"instruction": "question", "output": "answer", "system": "system_prompt"}},
        ),
    ],
)
def test_what_is_written_plans_clean_and_can_be_trained(
    init: Spurline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    row: dict[str, Any],
    words: tuple[str, ...],
    expected: dict[str, Any],
) -> None:
    monkeypatch.chdir(tmp_path)
    file, answered = tmp_path / "run.yaml", {**row, "reference": "1"}
    data = rows(tmp_path / "train data.jsonl", answered if "--reward" in words else row)
    code, out, err = init(data, "--eval", rows(tmp_path / "test.jsonl", answered), *words, plan=True)
    assert code == 0, err
    assert "No problems found. Train with: spurline train" in out
    assert "is plain text that the model continues" not in out
    assert expected.get("task", "") in out
    config = load_config(file).config
    assert config.source.name == expected["source"]
    assert config.data.train[0].columns == config.data.eval[0].columns == expected.get("columns", {})
    assert config.loss.name == expected.get("loss", config.loss.name)
    assert config.steps == expected.get("steps", config.steps)
    assert config.epochs == expected.get("epochs", config.epochs)
    assert config.backend.facts.trains_adapters == ("rank" in expected)
    if expected["source"] not in ("rollouts", "async_rollouts"):
        assert train(load_config(file, ["steps=1", "epochs=null", "backend.device=cpu"])).status == "finished"


@pytest.mark.processes
def test_the_first_asynchronous_run_trains_as_it_is_written(
    init: Spurline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = rows(tmp_path / "train.jsonl", {"question": "say 1", "answer": "1"})
    assert init(data, "--task", "async", "--steps", "2")[0] == 0
    # Smaller, and nothing else.
    sizes = {"prompts_per_step": 4, "samples_per_prompt": 2, "sampling.max_new_tokens": 4}
    less = [*(f"source.{name}={size}" for name, size in sizes.items()), "minibatches.prompts_per_minibatch=2"]
    result = train(load_config(tmp_path / "run.yaml", less))
    assert (result.status, result.step) == ("finished", 2)


@pytest.mark.parametrize(
    ("gpus", "engine", "staleness"),
    [(0, "child_process", 2), (1, "{'name': 'vllm', 'placement': 'colocated'}", 1), (2, "vllm", 2)],
)
def test_what_generates_beside_training_is_chosen_by_the_gpus(
    init: Spurline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, engine: str, staleness: int
) -> None:
    monkeypatch.setattr(command, "num_gpus", lambda: gpus)
    monkeypatch.setattr(command, "find_spec", lambda _: True)
    data = rows(tmp_path / "train.jsonl", CHAT)
    code, _, err = init(data, "--task", "async")
    assert code == 0, err
    source = YAML(typ="safe", pure=True).load(tmp_path / "run.yaml")["source"]
    assert (str(source["engine"]), source["max_staleness"]) == (engine, staleness)
    monkeypatch.setattr(command, "installed_plugins", dict)
    code, _, err = init(data, "--task", "async", file="other.yaml")
    assert (code, install_command("async_rl") in err, (tmp_path / "other.yaml").exists()) == (2, True, False)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"Question": "a", "Response": "b"}, {"instruction": "Question", "output": "Response"}),
        ({"instruction": "a", "response": "b"}, {"output": "response"}),
        (
            {"context": "a", "question": "b", "answer": "c"},
            {"instruction": "question", "output": "answer", "input": "context"},
        ),
        ({"conversation": [{"role": "user", "content": "a"}]}, {"messages": "conversation"}),
        ({"question": "a", "chosen": "b", "rejected": "c"}, {"prompt": "question"}),
        ({"content": "a", "number": 1}, {"text": "content"}),
        # Columns that could mean something else stay unnamed.
        ({"question": "a", "answer": 3}, {}),
        ({"prompt": [{"role": "user", "content": "a"}], "answer": "b"}, {}),
        ({"prompt": "a", "completion": "b", "response": "c"}, {}),
    ],
)
def test_columns_are_guessed_by_names_that_say_one_thing(row: dict[str, Any], expected: dict[str, str]) -> None:
    assert guessed_columns(row) == expected


def test_the_answers_that_prompts_are_compared_with_are_found_too(init: Spurline, tmp_path: Path) -> None:
    row = {"prompt": CHAT["messages"][:1], "reward_model": {"ground_truth": "1"}}
    code, out, err = init(rows(tmp_path / "train.jsonl", row))
    assert code == 0, err
    assert "columns: reward_model.ground_truth is read as reference. This is a guess" in out
    config = load_config(tmp_path / "run.yaml").config
    assert config.source.name == "rollouts"
    assert config.data.train[0].columns == {"reference": "reward_model.ground_truth"}


def test_columns_that_nobody_can_guess_are_named_by_an_option(init: Spurline, tmp_path: Path) -> None:
    data = rows(tmp_path / "train.jsonl", {"frage": "1", "antwort: x": "2"})
    code, _, err = init(data)
    assert (code, "--column instruction=NAME --column output=NAME" in err) == (2, True), err
    code, _, err = init(data, "--column", "instruction=frage", "--column", "output=antwort: x")
    assert code == 0, err
    assert load_config(tmp_path / "run.yaml").config.data.train[0].columns["output"] == "antwort: x"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data DATA", "Missing option '--model'"),
        ("--model MODEL", "Missing option '--data'"),
        ("--model MODEL --data DATA --task dpo", "--task dpo needs rows with chosen and rejected"),
        ("--model MODEL --data DATA --task stf", "is not one of sft, dpo, rl, async"),
        ("--model MODEL --data DATA --reward x", "--reward is for reinforcement learning"),
        ("--model MODEL --data DATA --epochs 1 --steps 1", "--epochs and --steps are both given"),
        ("--model MODEL --data DATA --epochs -1", "epochs"),
        ("--model MODEL --data DATA --task rl --reward exact_mach", "exact_mach"),
        ("--model MODEL --data nowhere.jsonl", "nowhere.jsonl"),
        ("--model nowhere/at/all --data DATA", "nowhere/at/all"),
    ],
)
def test_what_is_missing_or_wrong_is_named_and_nothing_is_written(
    spurline: Spurline, spurline_tiny_model: Path, tmp_path: Path, words: str, message: str
) -> None:
    places = {"MODEL": spurline_tiny_model, "DATA": rows(tmp_path / "train.jsonl", CHAT)}
    given = [places.get(word, word) for word in words.split()]
    code, _, err = spurline("init", tmp_path / "run.yaml", *given)
    assert code == 2
    assert message in err
    assert not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(
    "path", ["word and " * 15 + "rows.jsonl", "a: b # 'c' \"d\" [x], {y}  # z.jsonl", "no", "- 1", "123", "*.jsonl"]
)
def test_any_path_is_written_as_it_is(path: str) -> None:
    model = ModelFacts(path, 10, 128, has_chat_template=True)
    data = DataFacts("sft", "conversations", has_reference=True, is_chat=True)
    options = Options(path, path, "sft", eval=path, reward=None, lora=False, epochs=None, steps=1)
    text = config_text(options, model, data, run_dir=path)
    read = YAML(typ="safe", pure=True).load(text)
    assert (read["model"]["path"], read["run_dir"]) == (path, path)
    assert read["data"]["train"] == read["data"]["eval"] == path


def test_a_file_that_is_there_stays_and_is_told_before_anything_large_is_imported(
    init: Spurline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.yaml").write_text("mine\n")
    data = rows(tmp_path / "train.jsonl", CHAT)
    with monkeypatch.context() as patch:
        patch.setattr(init_command, "importing", lambda: pytest.fail("imported"))
        code, _, err = init(data)
    assert (code, "exists. Give --force" in err) == (2, True)
    assert (tmp_path / "run.yaml").read_text() == "mine\n"
    assert init(data, "--force")[0] == 0
    code, _, err = init(data, file="run.toml")
    assert (code, "is YAML" in err, (tmp_path / "run.toml").exists()) == (2, True, False)


@pytest.mark.parametrize("command", ["train", "plan", "data", "doctor"])
def test_a_config_that_is_missing_is_told_with_the_command_that_writes_one(
    spurline: Spurline, tmp_path: Path, command: str
) -> None:
    for words in ((tmp_path / "run.yaml",), ()):
        code, _, err = spurline(command, *words)
        assert (code, "`spurline init` writes one" in err) == (2, True), err
