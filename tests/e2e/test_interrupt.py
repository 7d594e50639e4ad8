"""Ctrl-C is answered at once, stops a run after its step, and is no failure. A second one stops it now."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from run_helpers import Config, Spurline, at, train

from spurline import load_config
from spurline.errors import RunFailedError
from spurline.plugins.hookspecs import hookimpl
from spurline.run import loop
from spurline.run.directory import RunDirectory
from spurline.run.endings.stop_request import StopRequest
from spurline.run.evaluations.evaluation import DataEvaluation
from spurline.run.session import Session
from spurline_insight.report.page import write_run_report
from spurline_models.local.backend import LocalBackend
from spurline_text.sources.sft import SftSource


def interrupt(times: int = 1, number: signal.Signals = signal.SIGINT) -> None:
    for _ in range(times):
        signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_the_first_one_ends_a_start_that_waits(
    base_config: Config,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    when: str,
) -> None:
    def start(*_: object) -> None:
        if when == "meanwhile":
            interrupt(1, number)
        raise AssertionError("the start goes on")

    monkeypatch.setattr(SftSource, "start", start)
    result = train(base_config, **({"on_run_start": lambda: interrupt(1, number)} if when == "before" else {}))
    assert (result.status, result.step, result.signal) == ("stopped", 0, number)
    if number == signal.SIGINT:
        assert "Stopping before step 1; press Ctrl-C again to stop now." in capfd.readouterr().err


def test_one_during_the_start_leaves_the_evaluation_that_the_last_step_is_owed(
    base_config: Config, spurline_chat_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RunFailedError("a reward")

    base_config |= {"steps": 2, "checkpoint": {"export_hf": True}}
    base_config["data"]["eval"] = str(spurline_chat_file)
    with monkeypatch.context() as patch:
        patch.setattr(DataEvaluation, "evaluate", fail)
        with pytest.raises(RunFailedError):
            train(base_config)
    result = train(base_config, on_run_start=lambda: interrupt(1, signal.SIGTERM))
    assert (result.status, result.model, result.signal) == ("stopped", None, signal.SIGTERM)
    assert ["eval/loss" in line for line in train(base_config).lines] == [False, True]


def test_a_closed_standard_error_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise BrokenPipeError

    monkeypatch.setattr(os, "write", refuse)
    with StopRequest(lambda: "Finishing") as stop:
        interrupt()
    assert stop


@pytest.mark.parametrize("saves", [True, False])
def test_a_second_one_is_an_interruption_and_no_failure(base_config: Config, saves: bool) -> None:
    if not saves:
        base_config["checkpoint"] = {}
    loaded = load_config(base_config)
    with pytest.raises(KeyboardInterrupt) as raised:
        train(loaded, on_step_start=at(5, interrupt, 2))
    run_dir = Path(base_config["run_dir"])
    where = f"The last checkpoint is {run_dir}/checkpoints/step-00000004." if saves else "There is no checkpoint."
    assert str(raised.value) == f"Stopped at once, after step 4. {where} Train the same config again to go on."
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    page = write_run_report(loaded, RunDirectory(run_dir)).read_text()
    assert ">Interrupted<" in page
    assert ">Failed<" not in page
    assert train(base_config).step == 6


def test_one_while_the_run_is_built_leaves_everything_as_it_was(
    base_config: Config, spurline: Spurline, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that was started in the background may ignore the signal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(LocalBackend, "__init__", lambda *_, **__: interrupt())
    try:
        code, _, err = spurline("train", base_config, "--resume", "never")
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    assert "Interrupted before training began" in err
    assert err.endswith("run.yaml --resume never\n")
    assert not err.startswith("Error")
    assert [path.name for path in Path(base_config["run_dir"]).iterdir()] == ["run.lock"]


def test_one_while_what_was_started_ends_leaves_a_finished_run_finished(
    base_config: Config, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalBackend, "close", lambda _: interrupt())
    result = train(base_config)
    assert (result.status, result.signal) == ("finished", None)
    assert "Training is over: closing what the run has opened; press Ctrl-C again" in capfd.readouterr().err


def test_the_end_says_how_to_go_on(spurline: Spurline, base_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    class InterruptAtStepTwo:
        on_step_start = staticmethod(hookimpl(at(2, interrupt)))

    original = loop.train

    def interrupted(run: Session) -> None:
        run.loaded.host.attach(InterruptAtStepTwo(), "interrupt")
        original(run)

    monkeypatch.setattr(loop, "train", interrupted)
    code, out, _ = spurline("train", base_config, "--set", "seed=3", "--set", "steps=9")
    assert code == 128 + signal.SIGINT
    assert "Stopped on request at step 2." in out
    assert out.rstrip().endswith("run.yaml --set seed=3 --set steps=9")
