"""Every mistake gives one paragraph with the fix, the right exit code, no traceback, and loses nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import read_metrics

from spurline import Run, load_config
from spurline.plugins.host import installed_plugins
from spurline.plugins.official import install_command
from spurline.run.directory import RunDirectory

Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[dict[str, Any]], Path]


@pytest.fixture
def fails(spurline: Spurline, write_config: WriteConfig) -> Callable[..., str]:
    """Train with this config; returns the error text after checking its form."""

    def run(config: dict[str, Any], *arguments: object, code: int = 2) -> str:
        got, _, err = spurline("train", write_config(config), *arguments)
        assert got == code, err
        assert err.startswith("Error: ")
        assert "Traceback" not in err
        return err

    return run


def test_an_unknown_plugin_says_what_is_installed_and_offers_no_stranger_to_install(
    fails: Any, base_config: Any, monkeypatch: pytest.MonkeyPatch
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
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_what_a_config_asks_for_in_vain_is_named(
    spurline: Spurline,
    write_config: WriteConfig,
    base_config: Any,
    tmp_path: Path,
    command: str,
    section: str,
    key: str,
    value: Any,
    words: list[str],
) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "bad.jsonl").write_text(json.dumps(good) + "\n" + json.dumps({"messages": []}) + "\n")
    (tmp_path / "empty.jsonl").write_text("")
    value = value.format(tmp_path) if isinstance(value, str) else value
    base_config[section] = {**base_config.get(section, {}), key: value}
    code, _, err = spurline(command, write_config(base_config))
    assert code == 2
    for word in words:
        assert word in err


def test_nan_loss_stops_with_the_samples_and_keeps_the_last_checkpoint(
    fails: Any, base_config: Any, tmp_path: Path
) -> None:
    # A learning rate this large makes the weights overflow in the very next forward pass.
    base_config |= {"optimizer": {"learning_rate": 1e30}, "checkpoint": {"every_steps": 1}}
    text = fails(base_config, code=1)
    assert re.search(r"Step 2: .*chat:\d+.*step-00000001", text, re.S), text
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert checkpoints == ["latest", "step-00000001"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]


@pytest.mark.parametrize("beside", [False, True])
def test_a_full_disk_at_checkpoint_time_keeps_the_previous_one(
    fails: Any, base_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, beside: bool
) -> None:
    from spurline_models.local import checkpoint

    real_write, written = checkpoint.write_tensor_file, []

    def write(path: Path, tensors: Any, metadata: Any) -> Any:
        written.append(path)
        # Three files per checkpoint: the disk fills up in the middle of the second one.
        if len(written) == 5:
            path.write_bytes(b"half of a")
            raise OSError(28, "No space left on device")
        return real_write(path, tensors, metadata)

    monkeypatch.setattr(checkpoint, "write_tensor_file", write)
    base_config["checkpoint"]["async"] = beside
    text = fails(base_config, code=1)
    assert "checkpoint of step 4 cannot be written" in text
    assert "No space left on device" in text
    assert "Kept: step-00000002" in text
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["latest", "step-00000002"]
    monkeypatch.undo()
    assert Run(load_config(base_config)).train().status == "finished"


def test_a_corrupt_checkpoint_offers_the_previous_good_one(
    fails: Any, spurline: Spurline, write_config: WriteConfig, base_config: Any
) -> None:
    spurline("train", write_config(base_config))
    latest = Path(base_config["run_dir"]) / "checkpoints" / "step-00000006"
    with (latest / "backend" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    text = fails(base_config)
    assert "model.safetensors has 1000 bytes" in text
    assert f"--resume {latest.with_name('step-00000004')}" in text


def test_export_refuses_a_folder_with_something_in_it(
    spurline: Spurline, write_config: WriteConfig, base_config: Any, tmp_path: Path
) -> None:
    spurline("train", write_config(base_config))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "config.json").write_text("{}")
    code, _, err = spurline("export", base_config["run_dir"], tmp_path / "precious")
    assert code == 2
    assert "exists and is not empty" in err
    assert (tmp_path / "precious" / "config.json").read_text() == "{}"


@pytest.mark.parametrize("command", ["export", "report"])
def test_a_model_in_the_place_of_a_run_is_told_in_a_sentence(
    spurline: Spurline, spurline_tiny_model: Path, tmp_path: Path, command: str
) -> None:
    code, _, err = spurline(command, spurline_tiny_model, *([tmp_path / "out"] if command == "export" else []))
    assert code == 2
    assert "not a run directory" in err
    assert "is not a setting" not in err


def test_two_runs_in_one_run_dir_are_refused(fails: Any, base_config: Any) -> None:
    directory = RunDirectory(Path(base_config["run_dir"]))
    directory.open()
    try:
        assert "is in use by another run" in fails(base_config)
    finally:
        directory.close()


def test_resume_never_refuses_a_run_dir_with_checkpoints_and_a_word_is_told_which_there_are(
    fails: Any, spurline: Spurline, write_config: WriteConfig, base_config: Any
) -> None:
    spurline("train", write_config(base_config))
    assert "already has checkpoints" in fails(base_config, "--resume", "never")
    text = fails(base_config, "--resume", "yes")
    assert "no folder of this name" in text
    assert f"{base_config['run_dir']}/checkpoints/step-0" in text


def test_changed_data_is_found_when_resuming(
    fails: Any, spurline: Spurline, write_config: WriteConfig, base_config: Any, spurline_chat_file: Path
) -> None:
    spurline("train", write_config(base_config), "--set", "steps=6")
    spurline_chat_file.write_text(spurline_chat_file.read_text().replace("say 3", "say x"))
    assert "training data is not what the checkpoint was trained on" in fails(base_config, "--set", "steps=9")


def test_debug_adds_the_traceback_and_keeps_the_exit_code(
    spurline: Spurline, write_config: WriteConfig, base_config: Any
) -> None:
    base_config["sead"] = 1
    code, _, err = spurline("train", write_config(base_config), "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "Did you mean 'seed'?" in err


@pytest.mark.parametrize(
    ("section", "key", "hint"),
    [
        ("optimizer", "lr", "Did you mean 'learning_rate'?"),
        ("model", "lora", "There is backend.lora."),
        ("model", "dtype", "There is backend.precision."),
        ("data", "on_bad_row", "There is data.train.on_bad_row and data.eval.on_bad_row."),
    ],
)
def test_a_setting_known_elsewhere_is_pointed_to(
    fails: Any, base_config: Any, section: str, key: str, hint: str
) -> None:
    base_config[section][key] = 1
    assert hint in fails(base_config)


@pytest.mark.parametrize("words", [["steps=5"], ["--steps", "5"]])
def test_a_setting_without_set_is_told_how_to_give_it(spurline: Spurline, words: list[str]) -> None:
    code, _, err = spurline("train", "run.yaml", *words)
    assert code == 2
    assert "--set KEY=VALUE" in err


def test_a_misspelled_option_is_not_taken_for_a_setting(spurline: Spurline) -> None:
    _, _, err = spurline("train", "run.yaml", "--resme", "auto")
    assert "--resume" in err
    assert "--set resme" not in err


def test_a_config_without_a_command_is_told_the_command(spurline: Spurline) -> None:
    assert "spurline train run.yaml" in spurline("run.yaml")[2]


def test_a_process_of_a_launcher_leaves_the_run_directory_alone(
    fails: Any, base_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    text = fails(base_config)
    assert "torchrun" in text
    assert "backend: {name: fsdp, ranks: 2}" in text
    assert not Path(base_config["run_dir"]).exists()


def test_an_adapter_in_the_place_of_a_model_is_told_with_its_base_model(
    fails: Any, spurline: Spurline, base_config: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    base_config["model"] = {"path": str(folder)}
    for text in (fails(base_config), spurline("generate", folder, "hello")[2]):
        assert "is an adapter, not a model" in text
        assert "org/base" in text
    (folder / "adapter_config.json").write_text("[")
    assert "is an adapter, not a model" in fails(base_config)


def test_a_mistyped_command_gets_the_nearest(spurline: Spurline) -> None:
    code, _, err = spurline("trian", "run.yaml")
    assert code == 2
    assert "'train'" in err
