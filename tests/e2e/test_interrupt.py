"""Ctrl-C: acknowledged at once, again to stop now, and never told as a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import read_metrics, wait_for

from spurline import Run, load_config
from spurline.errors import RunFailedError
from spurline.plugins.hookspecs import hookimpl
from spurline.run.directory import RunDirectory
from spurline.run.endings.stop_request import StopRequest
from spurline.run.evaluations.evaluation import DataEvaluation
from spurline.run.session import Session
from spurline_insight.report.page import write_run_report
from spurline_text.sources.sft import SftSource

Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[dict[str, Any]], Path]


class InterruptAt:
    """Ctrl-C so many times when this step begins."""

    def __init__(self, step: int, times: int) -> None:
        self._step, self._times = step, times

    @hookimpl
    def on_step_start(self, step: int) -> None:
        if step == self._step:
            for _ in range(self._times):
                signal.raise_signal(signal.SIGINT)


def test_the_first_one_is_answered_at_once(base_config: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_config(base_config)
    said: list[str] = []

    class Listener(InterruptAt):
        @hookimpl(trylast=True)
        def on_step_start(self, step: int) -> None:
            super().on_step_start(step)
            said.append(capfd.readouterr().err)

    loaded.host.attach(Listener(3, 1), "interrupt")
    result = Run(loaded).train()
    assert (result.status, result.step, result.signal) == ("stopped", 3, signal.SIGINT)
    assert said[2] == "Finishing step 3 and saving; press Ctrl-C again to stop now.\n"


def test_one_before_the_first_step_says_so(base_config: dict[str, Any], capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_config(base_config)

    class AtRunStart:
        @hookimpl
        def on_run_start(self) -> None:
            signal.raise_signal(signal.SIGINT)

    loaded.host.attach(AtRunStart(), "interrupt")
    assert Run(loaded).train().step == 0
    assert "Stopping before step 1; press Ctrl-C again to stop now." in capfd.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_the_first_one_ends_a_start_that_waits(
    base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, number: signal.Signals, when: str
) -> None:
    loaded = load_config(base_config)

    class AtRunStart:
        @hookimpl
        def on_run_start(self) -> None:
            if when == "before":
                signal.raise_signal(number)

    def start(*_: object) -> None:
        if when == "meanwhile":
            signal.raise_signal(number)
        raise AssertionError("the start goes on")

    loaded.host.attach(AtRunStart(), "interrupt")
    monkeypatch.setattr(SftSource, "start", start)
    result = Run(loaded).train()
    assert (result.status, result.step, result.signal) == ("stopped", 0, number)


def test_one_during_the_start_leaves_the_evaluation_that_the_last_step_is_owed(
    base_config: dict[str, Any], spurline_chat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RunFailedError("a reward")

    class AtRunStart:
        @hookimpl
        def on_run_start(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    base_config |= {"steps": 2, "checkpoint": {"export_hf": True}}
    base_config["data"]["eval"] = str(spurline_chat_file)
    with monkeypatch.context() as patch:
        patch.setattr(DataEvaluation, "evaluate", fail)
        with pytest.raises(RunFailedError):
            Run(load_config(base_config)).train()
    loaded = load_config(base_config)
    loaded.host.attach(AtRunStart(), "interrupt")
    result = Run(loaded).train()
    assert (result.status, result.model, result.signal) == ("stopped", None, signal.SIGTERM)
    assert Run(load_config(base_config)).train().status == "finished"
    assert ["eval/loss" in line for line in read_metrics(base_config["run_dir"])] == [False, True]


def test_a_closed_standard_error_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", refuse)
    with StopRequest(lambda: "Finishing") as stop:
        signal.raise_signal(signal.SIGINT)
    assert stop


@pytest.mark.parametrize("saves", [True, False])
def test_a_second_one_is_an_interruption_and_no_failure(base_config: dict[str, Any], saves: bool) -> None:
    if not saves:
        base_config["checkpoint"] = {}
    loaded = load_config(base_config)
    loaded.host.attach(InterruptAt(5, 2), "interrupt")
    with pytest.raises(KeyboardInterrupt) as raised:
        Run(loaded).train()
    run_dir = Path(base_config["run_dir"])
    where = f"The last checkpoint is {run_dir}/checkpoints/step-00000004." if saves else "There is no checkpoint."
    assert str(raised.value) == f"Stopped at once, after step 4. {where} Train the same config again to go on."
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    page = write_run_report(loaded, RunDirectory(run_dir)).read_text()
    assert ">Interrupted<" in page
    assert ">Failed<" not in page
    assert Run(load_config(base_config)).train().step == 6


def test_one_while_the_run_is_built_leaves_everything_as_it_was(
    base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline_models.local.backend import LocalBackend

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    # A process that was started in the background may ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(LocalBackend, "__init__", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt, match=r"Interrupted before training began; nothing in .* is lost"):
            Run(load_config(base_config)).train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert [path.name for path in Path(base_config["run_dir"]).iterdir()] == ["run.lock"]


def test_one_while_what_was_started_ends_leaves_a_finished_run_finished(
    base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from spurline_models.local.backend import LocalBackend

    monkeypatch.setattr(LocalBackend, "close", lambda _: signal.raise_signal(signal.SIGINT))
    result = Run(load_config(base_config)).train()
    assert (result.status, result.signal) == ("finished", None)
    assert "Ending what the run has started; press Ctrl-C again" in capfd.readouterr().err


def test_the_end_says_how_to_go_on(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline.run import loop

    train = loop.train

    def interrupted(run: Session) -> None:
        run.loaded.host.attach(InterruptAt(2, 1), "interrupt")
        train(run)

    monkeypatch.setattr(loop, "train", interrupted)
    path = write_config(base_config)
    code, out, _ = spurline("train", path, "--set", "seed=3", "--set", "steps=9")
    assert code == 128 + signal.SIGINT
    assert "Stopped on request at step 2." in out
    assert out.rstrip().endswith(f"Go on with: spurline train {path} --set seed=3 --set steps=9")


def test_the_words_of_an_interruption_reach_the_terminal(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spurline_models.local.backend import LocalBackend

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalBackend, "__init__", interrupted)
    path = write_config(base_config)
    code, _, err = spurline("train", path, "--resume", "never")
    assert code == 130
    assert err.endswith(f"is lost. Go on with: spurline train {path} --resume never\n")
    assert not err.startswith("Error")


def test_one_after_the_last_step_has_stopped_nothing(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "_export_if_finished", lambda *_: signal.raise_signal(signal.SIGINT))
    code, out, _ = spurline("train", write_config(base_config))
    assert (code, "Finished at step 6." in out) == (0, True)


@pytest.mark.processes
def test_ctrl_c_in_a_terminal_is_answered_and_ends_the_process_in_order(
    write_config: WriteConfig, base_config: dict[str, Any]
) -> None:
    base_config |= {"steps": 4000, "checkpoint": {}}
    path = write_config(base_config)
    command = [sys.executable, "-m", "spurline.cli", "train", str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = Path(base_config["run_dir"]) / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 4, "four steps")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    last = read_metrics(base_config["run_dir"])[-1]["step"]
    assert err.splitlines(keepends=True)[-1] in (
        f"Finishing step {last} and saving; press Ctrl-C again to stop now.\n",
        f"Stopping before step {last + 1}; press Ctrl-C again to stop now.\n",
    )
    assert f"Go on with: spurline train {path}" in out
