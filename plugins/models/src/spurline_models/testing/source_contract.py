"""Tests that every source of batches must pass. They train a tiny model for a few steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from spurline.config.loading import load_config
from spurline.data.batch import TrainingBatch
from spurline.errors import CheckpointError
from spurline.plugins import hookimpl
from spurline.protocols.source import BatchSource
from spurline.protocols.stateful import Stateful
from spurline.run.build import build_data
from spurline.run.run import Run
from spurline.testing.samples import check_batch

STEPS = 4
_CONTENT = ("input_ids", "segment_ids", "position_ids", "loss_weights", "advantages")

Config = dict[str, Any]
Train = Callable[..., "Recorded"]


@dataclass
class Recorded:
    """A recorded run: the columns of its batches by step, and the metrics of the last step."""

    batches: dict[int, dict[str, np.ndarray]]
    metrics: Mapping[str, float]


class SourceContract:
    """Tests of a source. Set `source_settings` in a subclass. Set other attributes and override methods if needed.

    Attributes:
        source_settings: The config's `source:` section.
        run_settings: Further settings of the run, by top-level key.
        plugins: The plugins to enable.
        repeats: Whether runs with the same config always get the same batches, resumed runs included.
        refuses_other_data: Whether a run refuses to resume if its rows have changed.
    """

    source_settings: ClassVar[Mapping[str, Any]] = {}
    run_settings: ClassVar[Mapping[str, Any]] = {}
    plugins: ClassVar[Sequence[str]] = ()
    repeats: ClassVar[bool] = True
    refuses_other_data: ClassVar[bool] = True

    def rows(self, word: str = "say") -> list[dict[str, Any]]:
        """Return rows to train on. They contain `word`, so a different word gives different rows."""
        return [
            {
                "messages": [
                    {"role": "user", "content": f"{word} {number}"},
                    {"role": "assistant", "content": str(number) * (1 + number % 5)},
                ]
            }
            for number in range(24)
        ]

    def data(self, folder: Path, word: str = "say") -> dict[str, Any]:
        """Write `rows(word)` to a JSONL file in the folder, and return the config's `data:` section for it."""
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows(word)), encoding="utf-8")
        return {"train": str(path), "max_length": 128}

    @pytest.fixture
    def config(self, spurline_tiny_model: Path, tmp_path: Path) -> Config:
        """Return the config of a run of STEPS steps."""
        assert self.source_settings, "set source_settings, the config's source: section"
        return {
            "plugins": list(self.plugins),
            "run_dir": str(tmp_path / "run"),
            "model": {"path": str(spurline_tiny_model)},
            "data": self.data(tmp_path),
            "source": dict(self.source_settings),
            "steps": STEPS,
            "optimizer": {"learning_rate": 1e-3},
            "schedule": "constant",
            "backend": {"name": "local", "device": "cpu", "num_threads": 1},
            "report": {"enabled": False},
            **self.run_settings,
        }

    @pytest.fixture
    def train(self, config: Config) -> Train:
        """Return a function that trains with the given top-level settings changed, and returns the recorded run."""

        def run(**changes: Any) -> Recorded:
            loaded, recorder = load_config(config | changes), _Recorder()
            loaded.host.attach(recorder, "contract/recorder")
            return Recorded(recorder.batches, Run(loaded).train().metrics)

        return run

    def test_facts_about_the_data_are_known_before_the_run(self, config: Config) -> None:
        with ExitStack() as stack:
            source = build_data(load_config(config), stack).source
            json.dumps(dict(source.summary()))
            assert source.total_steps == STEPS
            epochs = [source.epoch(step) for step in range(1, STEPS + 1)]
        assert epochs[0] > 0
        assert epochs == sorted(epochs)

    def test_each_step_has_a_batch_with_something_to_learn(self, train: Train) -> None:
        batches = train().batches
        assert list(batches) == list(range(1, STEPS + 1))
        assert all((batch["loss_weights"] != 0).any() for batch in batches.values())
        assert not _equal(batches[1], batches[2])

    def test_a_pure_source_builds_the_batch_of_a_step_whenever_it_is_asked(self, config: Config) -> None:
        with ExitStack() as stack:
            source = build_data(load_config(config), stack).source
            if source.pure:
                before = _state(source)
                in_order = {step: _columns(source.build(step)) for step in range(1, STEPS + 1)}
                for step in (STEPS, 2, 1, 2):
                    assert _equal(_columns(source.build(step)), in_order[step])
                assert _state(source) == before, (
                    "building a batch changed the state of a source that says it is pure. A checkpoint would then "
                    "count batches that were only built ahead. Set `self.pure = False`"
                )

    def test_the_same_config_gives_the_same_batches(self, train: Train, tmp_path: Path) -> None:
        if self.repeats:
            one, other = train(), train(run_dir=str(tmp_path / "other"))
            assert all(_equal(one.batches[step], other.batches[step]) for step in one.batches)

    def test_a_resumed_run_goes_on_with_the_next_batch(self, train: Train, tmp_path: Path) -> None:
        whole = train(run_dir=str(tmp_path / "whole"))
        # Resume after each step, since a source may lose state that matters only after some steps.
        for step in range(1, STEPS + 1):
            resumed = train(steps=step).batches
            assert list(resumed) == [step], "a resume neither repeats nor leaves out a step"
            if self.repeats:
                assert _equal(resumed[step], whole.batches[step]), f"step {step} after a resume"

    def test_a_resume_on_other_data_is_refused(self, train: Train, tmp_path: Path) -> None:
        if self.refuses_other_data:
            train(steps=2)
            self.data(tmp_path, "shout")
            with pytest.raises(CheckpointError):
                train()


class _Recorder:
    """Checks each batch and copies it before training, because training may reuse the buffers of the batch."""

    def __init__(self) -> None:
        self.batches: dict[int, dict[str, np.ndarray]] = {}

    @hookimpl(wrapper=True)
    def train_step(self, step: int, batch: TrainingBatch) -> Generator[None, Any, Any]:
        check_batch(batch)
        self.batches[step] = _columns(batch)
        return (yield)


def _columns(batch: TrainingBatch) -> dict[str, np.ndarray]:
    found = {name: batch.tokens[name] for name in _CONTENT if name in batch.tokens}
    return {name: torch.clone(column).numpy() for name, column in found.items()}


def _equal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    same = one.keys() == other.keys() and all(one[name].shape == other[name].shape for name in one)
    # Columns computed from logprobs are only nearly equal: the last digits depend on the other rows of a batch.
    return same and all(np.allclose(one[name], other[name], rtol=1e-4, atol=1e-5) for name in one)


def _state(source: BatchSource) -> str:
    return repr(source.state_dict()) if isinstance(source, Stateful) else ""
