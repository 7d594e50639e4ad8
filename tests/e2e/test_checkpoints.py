"""When a run saves, also beside training, which checkpoints it keeps, and how it starts again without one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from run_helpers import Config, Spurline, Trained, deterministic, fail_at, kept_steps, read_metrics, train, wait_for
from safetensors.torch import load_file

from spurline import Run, load_config
from spurline.errors import CheckpointWriteError, ConfigError, HookFailedError
from spurline.plugins.hookspecs import hookimpl
from spurline.protocols.stateful import StateParts
from spurline.run.checkpoints import saving
from spurline.run.checkpoints.checkpoint import CheckpointStore, open_checkpoint
from spurline_insight.report.record import read_record

GiveScores = Callable[..., None]


@pytest.fixture
def scored_config(base_config: Config, spurline_chat_file: Path) -> Config:
    """Six steps with an evaluation after each. The last and the best checkpoint are kept."""
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {"every_steps": 1}
    base_config["checkpoint"] = {"every_minutes": None, "keep_last": 1, "keep_best": "eval/score"}
    return base_config


def test_a_run_saves_every_quarter_of_an_hour_by_default(base_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    del base_config["checkpoint"]
    ticks = iter(range(0, 10**9, 6 * 60))
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    saved: list[int] = []
    train(base_config, steps=7, on_checkpoint_saved=lambda step: saved.append(step))
    # Each look at the clock is six minutes after the last one.
    assert saved == [3, 6, 7]


def test_minutes_save_too_and_without_any_rhythm_a_run_saves_only_at_its_end(base_config: Config) -> None:
    fail_at(base_config | {"checkpoint": {"every_minutes": None}}, 6)
    assert kept_steps(base_config["run_dir"]) == []
    base_config["checkpoint"] = {"every_minutes": 1e-9}
    fail_at(base_config, 4)
    assert kept_steps(base_config["run_dir"]) == [2, 3]
    assert train(base_config).steps == [1, 2, 3, 4, 5, 6]


def test_a_run_without_checkpoint_starts_again_and_keeps_what_the_first_attempt_left(
    spurline: Spurline, base_config: Config, spurline_chat_file: Path
) -> None:
    base_config["checkpoint"] = {"every_minutes": None}
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {
        "every_steps": 2,
        "generate": {"rewards": {"exact": "exact_match"}, "max_new_tokens": 2, "max_samples": 2},
    }
    run_dir = Path(base_config["run_dir"])
    attempts = []
    for attempt in (1, 2):
        fail_at(base_config, 2 + attempt)
        attempts.append((run_dir / "metrics.jsonl").read_bytes())
    code, out, _ = spurline("train", base_config)
    assert code == 0
    assert f"{run_dir} has 3 steps of an earlier attempt and no checkpoint, so the run starts again." in out
    assert str(run_dir / "before-2") in out
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
    for number, attempt in enumerate(attempts, start=1):
        record = run_dir / f"before-{number}"
        assert (record / "metrics.jsonl").read_bytes() == attempt
        assert len((record / "eval_samples.jsonl").read_text().splitlines()) == 2
        assert read_record(record).summary["status"] == "failed"
    assert len((run_dir / "eval_samples.jsonl").read_text().splitlines()) == 6
    code, out, _ = spurline("train", base_config)
    assert "earlier attempt" not in out


@pytest.mark.parametrize(
    ("scores", "setting", "best"),
    [
        ([1, 5, 2, 3, 4, 5], "eval/score", 2),
        ([3, 5, 2, 3, 4, 2], {"metric": "eval/score", "mode": "min"}, 3),
        # Less is better for losses and errors.
        ([1, 2, 3, 4, 5, 6], "eval/sum_error", 1),
    ],
)
def test_the_best_checkpoint_is_kept_besides_the_last(
    scored_config: Config, give_scores: GiveScores, scores: list[float], setting: Any, best: int
) -> None:
    scored_config["checkpoint"]["keep_best"] = setting
    name = setting if isinstance(setting, str) else "eval/score"
    give_scores(*scores, name=name.removeprefix("eval/"))
    run = train(scored_config)
    assert kept_steps(run) == sorted({best, 6})
    folder = run.run_dir / "checkpoints"
    assert (folder / "best").read_text() == f"step-{best:08d}\n"
    assert (folder / "latest").read_text() == "step-00000006\n"
    assert run.checkpoint == folder / "step-00000006"


def test_the_best_score_is_remembered_over_a_resume(scored_config: Config, give_scores: GiveScores) -> None:
    scored_config["checkpoint"]["every_steps"] = 1
    give_scores(1, 9, 2)
    fail_at(scored_config, 4)
    assert kept_steps(scored_config["run_dir"]) == [2, 3]
    # A kill between the checkpoint and the file that names it must not lose it.
    best = Path(scored_config["run_dir"]) / "checkpoints" / "best"
    best.unlink()
    give_scores(3, 4, 5)
    assert kept_steps(train(scored_config)) == [2, 6]
    assert best.read_text() == "step-00000002\n"


def test_a_resume_from_the_best_trains_the_later_steps_again(
    spurline: Spurline, scored_config: Config, give_scores: GiveScores
) -> None:
    for choice in ("best", "latest"):
        code, _, err = spurline("train", scored_config, "--resume", choice)
        assert (code, "Train it first" in err) == (2, False)
    assert "has no checkpoint. Leave out --resume" in err
    give_scores(1, 9, 2, 3, 4, 5)
    whole = train(scored_config).without_times
    give_scores(2, 3, 4, 5)
    code, out, err = spurline("train", scored_config, "--resume", "best")
    assert (code, err) == (0, "")
    assert "superseded-step-00000006" in out
    assert deterministic(read_metrics(scored_config["run_dir"])) == whole


def test_another_measure_of_the_best_begins_again_and_says_so(
    scored_config: Config, give_scores: GiveScores, capsys: pytest.CaptureFixture[str]
) -> None:
    scored_config["checkpoint"]["every_steps"] = 1
    give_scores(1, 9, 2)
    fail_at(scored_config, 4)
    scored_config["checkpoint"]["keep_best"] = {"metric": "eval/score", "mode": "min"}
    give_scores(3, 4, 5)
    assert kept_steps(train(scored_config)) == [4, 6]
    assert "the best eval/score so far, 9 at step 2, no longer counts" in capsys.readouterr().out


def test_the_best_checkpoint_can_be_exported_by_name(
    spurline: Spurline, scored_config: Config, give_scores: GiveScores, tmp_path: Path
) -> None:
    give_scores(1, 9, 2, 3, 4, 5)
    run_dir = train(scored_config).run_dir
    for name, step in (("best", 2), ("latest", 6)):
        code, _, err = spurline("export", run_dir, tmp_path / name, "--checkpoint", name)
        assert (code, err) == (0, "")
        weights = load_file(run_dir / "checkpoints" / f"step-{step:08d}" / "backend/model.safetensors")
        exported = load_file(tmp_path / name / "model.safetensors")
        assert all((exported[key] == weights[key]).all() for key in exported)
    (run_dir / "checkpoints" / "best").unlink()
    code, _, err = spurline("export", run_dir, tmp_path / "again", "--checkpoint", "best")
    assert (code, "has no best checkpoint" in err) == (2, True)


PATIENCE_S = 60


class Gate:
    """Holds back every write beside training until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self.reached = threading.Event()
        self.passed = threading.Event()
        prepare = CheckpointStore.prepare

        def held(store: CheckpointStore, *arguments: Any) -> Path:
            if threading.current_thread() is threading.main_thread():
                return prepare(store, *arguments)
            self.reached.set()
            assert self._open.wait(PATIENCE_S)
            try:
                return prepare(store, *arguments)
            finally:
                self.passed.set()

        monkeypatch.setattr(CheckpointStore, "prepare", held)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


@pytest.fixture
def beside(base_config: Config) -> Config:
    """Steps 2 and 4 are written beside training, and step 6, the last one, at once."""
    base_config["model"]["config_overrides"] = {"attention_dropout": 0.1}
    base_config["checkpoint"] = {"every_steps": 2, "keep_last": 9, "async": True}
    base_config["report"] = {"enabled": False}
    return base_config


class Watcher:
    """Keeps state that it changes in place, and notes what it sees. at: functions to call when a step begins."""

    def __init__(self, at: Mapping[int, Any] | None = None) -> None:
        self._at = at or {}
        self.saved: list[tuple[int, int, bool]] = []
        self.seen: list[int] = []
        self.array, self.parts = np.zeros(3), [np.zeros(2)]
        self.nested: dict[str, Any] = {"list": [0]}

    def state_dict(self) -> dict[str, object]:
        parts = StateParts(lambda: ({"values": values} for values in self.parts))
        return {"array": self.array, "parts": parts, "nested": self.nested}

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...

    @hookimpl
    def on_run_start(self, run: Run) -> None:
        self.run = run
        run.keep_state("watcher", self)  # type: ignore[arg-type]

    @hookimpl
    def on_step_start(self, step: int) -> None:
        self.seen.append(self.run.state.saved_step)
        self.array += 1
        self.parts[0] += 1
        self.nested["list"][0] += 1
        if step in self._at:
            self._at[step]()

    @hookimpl
    def on_checkpoint_saved(self, step: int, path: Path) -> None:
        open_checkpoint(path)
        assert self.run.state.checkpoint == path
        self.saved.append((step, self.run.state.step, threading.current_thread() is threading.main_thread()))


def contents(run: Trained, step: int) -> dict[str, bytes]:
    """Return the files of a checkpoint, except the manifest, which names settings of the run."""
    folder = run.run_dir / "checkpoints" / f"step-{step:08d}"
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }


def test_what_is_written_later_is_what_was_there_at_the_step(beside: Config, gate: Gate) -> None:
    # Opened after step 3 has changed all that step 2 is to save.
    watcher = Watcher({4: gate.open})
    run = train(beside, watcher)
    at_once = train(beside, Watcher(), name="at-once", checkpoint={**beside["checkpoint"], "async": False})
    assert kept_steps(run) == kept_steps(at_once) == [2, 4, 6]
    for step in (2, 4, 6):
        assert contents(run, step) == contents(at_once, step)
    assert run.without_times == at_once.without_times
    # Hooks hear of a checkpoint once it is complete, on the thread of the loop, when a step has ended.
    assert watcher.seen[:4] == [0, 0, 0, 0]
    assert [(step, on_loop) for step, _, on_loop in watcher.saved] == [(2, True), (4, True), (6, True)]
    assert watcher.saved[0][1] in (4, 5)
    # The line of the next step tells how long a copy took.
    assert [line["step"] for line in run.lines if "time/checkpoint_copy" in line] == [3, 5]


def test_a_run_that_fails_while_a_checkpoint_is_written_keeps_it(beside: dict[str, Any], gate: Gate) -> None:
    def fail() -> None:
        gate.open()
        raise ZeroDivisionError

    watcher = Watcher({4: fail})
    with pytest.raises(HookFailedError):
        train(beside, watcher)
    assert kept_steps(beside["run_dir"]) == [2]
    assert watcher.run.state.saved_step == 2
    assert train(beside, Watcher()).steps == [1, 2, 3, 4, 5, 6]


def test_a_second_signal_leaves_nothing_that_could_become_a_checkpoint_later(
    beside: dict[str, Any], gate: Gate
) -> None:
    def interrupt() -> None:
        assert gate.reached.wait(PATIENCE_S)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="There is no checkpoint"):
        train(beside, Watcher({4: interrupt}))
    gate.open()
    assert gate.passed.wait(PATIENCE_S)
    folder = Path(beside["run_dir"]) / "checkpoints"
    wait_for(lambda: not any(folder.iterdir()), "the folder to be empty again")


def test_a_write_that_hangs_ends_the_run_with_what_it_waited_for(
    beside: dict[str, Any], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "WAIT_LIMIT_S", 0.1)
    with pytest.raises(CheckpointWriteError, match=r"step 2 is still being written to .*checkpoints after"):
        train(beside, Watcher())
    gate.open()
    assert gate.passed.wait(PATIENCE_S)
    assert kept_steps(beside["run_dir"]) == []


def test_a_backend_that_cannot_be_saved_while_it_trains_is_refused(beside: dict[str, Any]) -> None:
    beside |= {"plugins": ["fsdp_backend"], "backend": {"name": "fsdp", "device": "cpu"}}
    with pytest.raises(ConfigError, match=r"checkpoint\.async is not supported by backend 'fsdp'.*local"):
        load_config(beside)
