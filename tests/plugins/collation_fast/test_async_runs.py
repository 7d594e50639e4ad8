"""Whole runs with and without async collation: the same metrics, weights and checkpoints, and the right error."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_same_weights, deterministic, read_metrics, train, wait_for

from spurline.data.batch import TrainingBatch
from spurline.data.collators.reference import PackedCollator
from spurline.data.token_store import TokenView
from spurline.plugins.hookspecs import hookimpl
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline_text.sources.sft import SftSource

ASYNC_ONLY = "collation/hidden"


@pytest.fixture
def config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    """Eleven steps over one and a half epochs, with evaluation and checkpoints out of step with one another."""
    return {
        "plugins": ["collation_fast"],
        "model": {"path": str(spurline_tiny_model), "config_overrides": {"attention_dropout": 0.1}},
        "data": {"train": str(spurline_chat_file), "eval": str(spurline_chat_file), "max_length": 128},
        "batch_size": 9,
        "epochs": 1.5,
        "optimizer": {"learning_rate": 1e-3},
        "tokenization": "text/sequential",
        "collator": {"name": "core/packed", "max_tokens": 256},
        "checkpoint": {"every_steps": 4},
        "evaluation": {"every_steps": 3},
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
        "run_dir": str(tmp_path / "run"),
    }


def comparable(run_dir: str) -> list[dict[str, Any]]:
    """Metrics without wall times and what follows from them."""
    lines = deterministic(read_metrics(run_dir))
    return [{name: value for name, value in line.items() if name != ASYNC_ONLY} for line in lines]


@pytest.mark.parametrize(("depth", "collator"), [(1, {"name": "packed", "max_tokens": 256}), (5, {"name": "padded"})])
def test_a_run_whose_buffers_are_filled_while_it_trains_stopped_and_resumed_equals_a_serial_run_of_the_reference(
    config: dict[str, Any], tmp_path: Path, depth: int, collator: dict[str, Any]
) -> None:
    reference = {**collator, "name": f"core/{collator['name']}"}
    whole = config | {"run_dir": str(tmp_path / "serial"), "prefetch": "core/serial", "collator": reference}
    train(whole)
    ahead = {"prefetch": {"name": "async", "depth": depth}, "collator": collator}
    pieces = config | ahead | {"run_dir": str(tmp_path / "async")}
    before = set(threading.enumerate())
    assert train(pieces, stop_after=2).step == 2
    assert train(pieces, stop_after=7).step == 7
    assert train(pieces).status == "finished"
    assert set(threading.enumerate()) <= before
    assert len(comparable(pieces["run_dir"])) == 11
    assert comparable(pieces["run_dir"]) == comparable(whole["run_dir"])
    assert_same_weights(tmp_path / "async", tmp_path / "serial")
    assert all(0 <= line[ASYNC_ONLY] <= 1 for line in read_metrics(pieces["run_dir"]))


def test_checkpoints_record_the_last_step_trained_on_not_the_ones_collated_ahead(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config |= {"prefetch": {"name": "async", "depth": 3}, "checkpoint": {"every_steps": 2}}
    built = record_builds(monkeypatch)
    watcher = CheckpointWatcher(Path(config["run_dir"]), built)
    train(config, watcher, stop_after=7)
    assert watcher.saved == [2, 4, 6, 7]
    assert watcher.ahead == [3, 3, 3, 3]
    built.clear()
    trained = Trained()
    train(config, trained)
    assert trained.steps == [8, 9, 10, 11]
    assert sorted(built) == [8, 9, 10, 11]


def test_a_failing_build_ends_the_run_at_the_step_that_needed_it(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    record_builds(monkeypatch, broken_from=4)
    trained = Trained()
    with pytest.raises(ValueError, match="broken sample in step 4") as raised:
        train(config | {"prefetch": {"name": "async", "depth": 3}}, trained)
    assert any(entry.name == "build" for entry in raised.traceback), "the error lost its own traceback"
    assert trained.steps == [1, 2, 3]
    summary = json.loads((Path(config["run_dir"]) / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("failed", "broken sample in step 4")


def test_a_broken_batch_of_an_evaluation_ends_the_run_with_its_error_and_leaves_no_thread(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PackedCollator.collate

    def collate(self: PackedCollator, samples: TokenView, *, training: bool) -> TrainingBatch:
        if not training:
            raise ValueError("broken held-out sample")
        return original(self, samples, training=training)

    monkeypatch.setattr(PackedCollator, "collate", collate)
    trained, before = Trained(), set(threading.enumerate())
    with pytest.raises(ValueError, match="broken held-out sample") as raised:
        train(config | {"prefetch": {"name": "async", "depth": 4}}, trained)
    assert any(entry.name == "collate" for entry in raised.traceback), "the error lost its own traceback"
    assert trained.steps == [1, 2], "the first evaluation belongs to step 3"
    assert set(threading.enumerate()) <= before


def record_builds(monkeypatch: pytest.MonkeyPatch, broken_from: int = 1000) -> list[int]:
    """Watch the source: the list of steps that were built, in order."""
    built: list[int] = []
    original = SftSource.build

    def build(self: SftSource, step: int) -> TrainingBatch:
        built.append(step)
        if step >= broken_from:
            raise ValueError(f"broken sample in step {step}")
        return original(self, step)

    monkeypatch.setattr(SftSource, "build", build)
    return built


class Trained:
    """Which steps were trained on."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    @hookimpl
    def on_step_end(self, step: int) -> None:
        self.steps.append(step)


class CheckpointWatcher:
    """At each checkpoint: its step, and how many steps had been collated beyond it."""

    def __init__(self, run_dir: Path, built: list[int]) -> None:
        self._store = CheckpointStore(run_dir / "checkpoints")
        self._built = built
        self.saved: list[int] = []
        self.ahead: list[int] = []

    @hookimpl
    def on_checkpoint_saved(self, step: int) -> None:
        wait_for(lambda: max(self._built) >= step + 3, f"the batches after step {step} to be begun")
        latest = self._store.latest()
        assert latest is not None
        assert latest.step == step
        self.saved.append(latest.step)
        self.ahead.append(max(self._built) - step)
