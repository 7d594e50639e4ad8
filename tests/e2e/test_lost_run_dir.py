"""The run directory disappears while the run is going on."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_same_weights, deterministic, read_metrics

from spurline import Run, load_config
from spurline.errors import RunDirectoryLostError
from spurline.plugins.hookspecs import hookimpl
from spurline.run.endings import rescue as rescue_module

Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[dict[str, Any]], Path]


class AtStart:
    """Does something when a step begins."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        self._step, self._action = step, action

    @hookimpl
    def on_step_start(self, step: int) -> None:
        if step == self._step:
            self._action()


def run_losing(config: dict[str, Any], lose: Callable[[Path], object], step: int = 4) -> str:
    """Train, and lose the directory in this step; returns what the run says."""
    loaded = load_config(config)
    loaded.host.attach(AtStart(step, lambda: lose(Path(config["run_dir"]))), "lose")
    with pytest.raises(RunDirectoryLostError) as raised:
        Run(loaded).train()
    return str(raised.value)


def empty(folder: Path) -> None:
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()


@pytest.mark.parametrize("lose", [shutil.rmtree, empty, replace])
def test_the_step_in_which_it_was_lost_is_saved_beside_and_the_run_goes_on_from_there(
    base_config: dict[str, Any], tmp_path: Path, lose: Callable[[Path], object]
) -> None:
    whole = {**base_config, "run_dir": str(tmp_path / "whole")}
    Run(load_config(whole)).train()
    text = run_losing(base_config, lose)
    rescued = tmp_path / "run-rescued-4"
    assert "while the run was going on" in text
    assert f"Step 4 is saved in {rescued}" in text
    assert not (tmp_path / "run" / "checkpoints").exists(), "the lost folder must not come back half"
    summary = json.loads((rescued / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "while the run was going on" in summary["error"]
    Run(load_config({**base_config, "run_dir": str(rescued)})).train()
    assert deterministic(read_metrics(rescued)) == deterministic(read_metrics(whole["run_dir"]))[3:]
    assert_same_weights(rescued, tmp_path / "whole")


def test_a_step_whose_answers_cannot_be_written_is_saved_and_evaluated_again(
    base_config: dict[str, Any], tmp_path: Path, spurline_chat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline.run.evaluations.evaluation import DataEvaluation

    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {
        "every_steps": 3,
        "generate": {"rewards": {"exact": "exact_match"}, "max_new_tokens": 2, "max_samples": 2},
    }
    whole = {**base_config, "run_dir": str(tmp_path / "whole")}
    Run(load_config(whole)).train()
    evaluate = DataEvaluation.evaluate

    def lose(self: DataEvaluation, backend: Any) -> Any:
        shutil.rmtree(base_config["run_dir"])
        return evaluate(self, backend)

    with monkeypatch.context() as patch:
        patch.setattr(DataEvaluation, "evaluate", lose)
        with pytest.raises(RunDirectoryLostError, match="Step 3 is saved in"):
            Run(load_config(base_config)).train()
    rescued = tmp_path / "run-rescued-3"
    Run(load_config({**base_config, "run_dir": str(rescued)})).train()
    lines = deterministic(read_metrics(rescued))
    assert [line["step"] for line in lines] == [3, 4, 5, 6]
    assert lines == deterministic(read_metrics(whole["run_dir"]))[2:]


def test_an_asynchronous_run_is_rescued_too(rl_config: dict[str, Any], tmp_path: Path) -> None:
    rl_config["plugins"] = ["async_rl"]
    rl_config |= {"steps": 4}
    rl_config["source"] |= {"name": "async_rollouts", "max_staleness": 1, "correction": "tis", "stall_timeout_s": 30}
    text = run_losing(rl_config, shutil.rmtree, step=2)
    assert f"Step 2 is saved in {tmp_path / 'run-rescued-2'}" in text
    assert Run(load_config({**rl_config, "run_dir": str(tmp_path / "run-rescued-2")})).train().step == 4


def test_the_command_ends_with_exit_code_1_and_says_how_to_go_on(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline.trackers.jsonl import JsonlTracker

    log = JsonlTracker.log

    def lose_then_log(self: JsonlTracker, step: int, metrics: Any) -> None:
        if step == 3:
            shutil.rmtree(base_config["run_dir"], ignore_errors=True)
        log(self, step, metrics)

    monkeypatch.setattr(JsonlTracker, "log", lose_then_log)
    path = write_config(base_config)
    code, _, err = spurline("train", path, "--set", "batch_size=4")
    assert code == 1
    assert "metrics.jsonl was removed while the run was going on" in err
    command = f"spurline train {path} --set batch_size=4 --set run_dir={base_config['run_dir']}-rescued-3"
    assert command in err
    code, out, _ = spurline(*command.split()[1:])
    assert code == 0
    assert "Finished at step 6" in out


def test_a_directory_lost_after_the_last_step_costs_nothing(base_config: dict[str, Any], tmp_path: Path) -> None:
    loaded = load_config(base_config)

    class AtEnd:
        @hookimpl
        def on_step_end(self, step: int) -> None:
            if step == 6:
                shutil.rmtree(base_config["run_dir"])

    loaded.host.attach(AtEnd(), "lose")
    with pytest.raises(RunDirectoryLostError, match="Step 6 is saved in"):
        Run(loaded).train()
    assert (tmp_path / "run-rescued-6" / "checkpoints" / "step-00000006").is_dir()


def test_what_cannot_be_saved_beside_goes_to_a_temporary_folder(
    base_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(elsewhere))

    def refuse(*_: object) -> Path:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(rescue_module, "_new_folder", refuse)
    text = run_losing(base_config, shutil.rmtree)
    (folder,) = elsewhere.iterdir()
    assert "Permission denied" in text
    assert f"Step 4 is saved in {folder}" in text
    assert (folder / "checkpoints" / "step-00000004" / "manifest.json").exists()


def test_a_directory_lost_while_the_run_is_built_is_named(
    base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline.backends.local.backend import LocalBackend

    build = LocalBackend.__init__

    def lose(self: LocalBackend, *arguments: Any, **keywords: Any) -> None:
        shutil.rmtree(base_config["run_dir"])
        build(self, *arguments, **keywords)

    monkeypatch.setattr(LocalBackend, "__init__", lose)
    with pytest.raises(RunDirectoryLostError, match=r"run_dir .* was removed or moved"):
        Run(load_config(base_config)).train()


def test_an_earlier_rescue_is_not_overwritten(base_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run-rescued-4").mkdir()
    assert str(tmp_path / "run-rescued-4-2") in run_losing(base_config, shutil.rmtree)


def test_hooks_see_the_end_of_a_rescued_step_once(base_config: dict[str, Any], tmp_path: Path) -> None:
    ends: list[int] = []

    class Ends:
        @hookimpl
        def on_step_end(self, step: int) -> None:
            ends.append(step)

    for run_dir, loses in ((base_config["run_dir"], True), (str(tmp_path / "run-rescued-4"), False)):
        loaded = load_config({**base_config, "run_dir": run_dir})
        loaded.host.attach(Ends(), "ends")
        if loses:
            loaded.host.attach(AtStart(4, lambda: shutil.rmtree(base_config["run_dir"])), "lose")
            with pytest.raises(RunDirectoryLostError):
                Run(loaded).train()
        else:
            Run(loaded).train()
    assert ends == [1, 2, 3, 4, 5, 6]


def test_what_fails_while_the_rest_is_saved_does_not_end_the_run_as_if_in_order(
    base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[BaseException | None] = []

    class Ends:
        @hookimpl
        def on_run_end(self, error: BaseException | None) -> None:
            errors.append(error)

    def fail(*_: object) -> None:
        raise ValueError("no state")

    loaded = load_config(base_config)
    loaded.host.attach(Ends(), "ends")

    def lose() -> None:
        shutil.rmtree(base_config["run_dir"])
        monkeypatch.setattr("spurline.run.checkpoints.saving.save_state", fail)

    loaded.host.attach(AtStart(4, lose), "lose")
    with pytest.raises(ValueError, match="no state"):
        Run(loaded).train()
    (error,) = errors
    assert isinstance(error, RunDirectoryLostError)
