"""Every mistake gives one paragraph with the fix, the right exit code, no traceback, and loses nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import Config, Spurline, kept_steps, write_rows

from spurline.plugins.host import installed_plugins
from spurline.plugins.official import install_command

Fails = Callable[..., str]


@pytest.fixture
def fails(spurline: Spurline) -> Fails:
    """Train with this config; returns the error text after checking its form."""

    def run(config: Config, *words: object, code: int = 2) -> str:
        got, _, err = spurline("train", config, *words)
        assert got == code, err
        assert err.startswith("Error: ")
        assert "Traceback" not in err
        return err

    return run


def test_an_unknown_plugin_says_what_is_installed_and_offers_no_stranger_to_install(
    fails: Fails, base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = fails(base_config | {"plugins": ["collation_fats"]})
    assert "Plugin 'collation_fats' is not installed" in text
    assert "pip install" not in text
    others = {name: plugin for name, plugin in installed_plugins().items() if name != "async_rl"}
    for module in ("config.loading", "plugins.host"):
        monkeypatch.setattr(f"spurline.{module}.installed_plugins", lambda: others)
    assert install_command("async_rl") in fails(base_config | {"plugins": ["async_rl"]})


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("data", "train", "{}/chatt.jsonl", ["chatt.jsonl", "chat.jsonl"]),
        ("data", "train", "{}/empty.jsonl", ["empty.jsonl"]),
        ("data", "train", "{}/bad.jsonl", ["bad.jsonl:2", "messages"]),
        ("data", "max_length", 1000, ["collator.max_tokens is 256", "data.max_length"]),
        ("model", "path", "./no-such-model", ["no-such-model"]),
        ("evaluation", "every_steps", 2, ["held-out data", "`data.eval`"]),
        ("collator", "max_token", 5, ["run.yaml:", "collator.max_token", "'max_tokens'"]),
        ("model", "lora", 1, ["It exists as backend.lora."]),
        ("data", "on_bad_row", 1, ["It exists as data.train.on_bad_row and data.eval.on_bad_row."]),
    ],
)
def test_what_a_config_asks_for_in_vain_is_named(
    fails: Fails, base_config: Config, tmp_path: Path, section: str, key: str, value: Any, words: list[str]
) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    write_rows(tmp_path / "bad.jsonl", [good, {"messages": []}])
    write_rows(tmp_path / "empty.jsonl", [])
    value = value.format(tmp_path) if isinstance(value, str) else value
    base_config[section] = {**base_config.get(section, {}), key: value}
    err = fails(base_config)
    assert all(word in err for word in words), err


def test_a_loss_that_is_not_finite_names_the_samples_and_the_last_checkpoint(fails: Fails, base_config: Config) -> None:
    # A learning rate this large makes the weights overflow in the very next forward pass.
    base_config |= {"optimizer": {"learning_rate": 1e30}, "checkpoint": {"every_steps": 1}}
    assert re.search(r"Step 2: .*chat:\d+.*step-00000001", fails(base_config, code=1), re.S)
    assert kept_steps(base_config["run_dir"]) == [1]


@pytest.mark.parametrize("command", ["export", "report"])
def test_a_model_in_the_place_of_a_run_is_told_in_a_sentence(
    spurline: Spurline, spurline_tiny_model: Path, tmp_path: Path, command: str
) -> None:
    code, _, err = spurline(command, spurline_tiny_model, *([tmp_path / "out"] if command == "export" else []))
    assert code == 2
    assert "not a run directory" in err
    assert "is not a setting" not in err


@pytest.mark.parametrize(("line", "told"), [("run.yaml", "spurline train run.yaml"), ("trian run.yaml", "'train'")])
def test_a_command_line_that_is_nearly_right_is_told_the_right_one(spurline: Spurline, line: str, told: str) -> None:
    code, _, err = spurline(*line.split())
    assert code == 2
    assert told in err


def test_debug_adds_the_traceback_and_keeps_the_exit_code(spurline: Spurline, base_config: Config) -> None:
    code, _, err = spurline("train", base_config | {"sead": 1}, "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "Did you mean 'seed'?" in err


def test_a_process_of_a_launcher_leaves_the_run_directory_alone(
    fails: Fails, base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    text = fails(base_config)
    assert "torchrun" in text
    assert "backend: {name: fsdp, ranks: 2}" in text
    assert not Path(base_config["run_dir"]).exists()


def test_an_adapter_in_the_place_of_a_model_is_told_with_its_base_model(
    fails: Fails, spurline: Spurline, base_config: Config, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    base_config["model"] = {"path": str(folder)}
    for text in (fails(base_config), spurline("generate", folder, "hello")[2]):
        assert "is an adapter, not a model" in text
        assert "org/base" in text
    (folder / "adapter_config.json").write_text("[")
    assert "is an adapter, not a model" in fails(base_config)
