"""Async on equals async off, tensor by tensor: the real source, over epochs, from any step, with evaluation between."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from spurline import load_config
from spurline.data.batch import TrainingBatch
from spurline.protocols.backend import Backend, LossSums
from spurline.protocols.prefetch import Prefetch
from spurline.run.build import build_data
from spurline.testing.collator_contract import assert_batches_equal, clone
from spurline_collation_fast.configs import AsyncPrefetchConfig
from spurline_collation_fast.prefetch import AsyncPrefetch

NUM_SAMPLES = 64
BATCH_SIZE = 7
EPOCHS = 3
STEPS = -(-NUM_SAMPLES * EPOCHS // BATCH_SIZE)
"""Neither a sample count nor an epoch is a multiple of the batch: each epoch ends inside a batch."""
DEPTHS = [1, 2, 5]

COLLATORS: list[dict[str, Any]] = [
    {"name": "core/packed", "max_tokens": 192, "align_to": 4},
    {"name": "padded", "pad_side": "left", "pad_to_multiple_of": 8},
    {"name": "packed", "max_tokens": 128},
]


@pytest.fixture(params=COLLATORS, ids=lambda settings: "-".join(str(value) for value in settings.values()))
def collator(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture
def config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path, collator: Any) -> dict[str, Any]:
    held_out = tmp_path / "held_out.jsonl"
    rows = spurline_chat_file.read_text().splitlines()[:30]
    held_out.write_text("".join(json.dumps(json.loads(row)) + "\n" for row in reversed(rows)))
    return {
        "plugins": ["collation_fast"],
        "run_dir": str(tmp_path / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file), "eval": str(held_out), "max_length": 128},
        "batch_size": BATCH_SIZE,
        "epochs": EPOCHS,
        "tokenization": "text/sequential",
        "collator": collator,
        "backend": {"name": "local", "device": "cpu"},
    }


class Parts:
    """The data components of one run. Each run has its own, as collators may reuse buffers."""

    def __init__(self, config: dict[str, Any], stack: ExitStack, **changes: Any) -> None:
        self.data = build_data(load_config(config | changes), stack)
        self.source = self.data.source

    def ahead(self, depth: int) -> AsyncPrefetch:
        config = AsyncPrefetchConfig(depth=depth, timeout_s=60)
        return AsyncPrefetch(config, build=self.source.build, last_step=self.source.total_steps)

    def serial(self) -> list[TrainingBatch]:
        return [clone(self.source.build(step)) for step in range(1, self.source.total_steps + 1)]

    def evaluate(self) -> list[TrainingBatch]:
        """Return the batches that an evaluation hands to the backend."""
        recorder = Recorder()
        [evaluation] = self.data.evaluations
        evaluation.run(cast(Backend, recorder))
        return recorder.seen


class Recorder:
    """Stands in for a backend that evaluates."""

    def __init__(self) -> None:
        self.seen: list[TrainingBatch] = []

    def evaluate(self, batch: TrainingBatch, objective: object) -> LossSums:
        self.seen.append(clone(batch))
        return LossSums(loss=1.0, weight=1.0, tokens=1)


def serve(prefetch: Prefetch, first: int, last: int) -> list[TrainingBatch]:
    prefetch.start(first)
    served: list[TrainingBatch] = []
    for step in range(first, last + 1):
        batch = prefetch.next(step)
        served.append(clone(batch))
        batch.release()
    return served


def assert_all_equal(batches: list[TrainingBatch], expected: list[TrainingBatch]) -> None:
    for batch, wanted in zip(batches, expected, strict=True):
        assert_batches_equal(batch, wanted)


def test_three_epochs_and_what_begins_anywhere_in_them_are_equal(config: dict[str, Any]) -> None:
    with ExitStack() as stack:
        expected = Parts(config, stack).serial()
        parts = Parts(config, stack)
        assert parts.source.total_steps == STEPS
        for depth in DEPTHS:
            prefetch = parts.ahead(depth)
            assert_all_equal(serve(prefetch, 1, STEPS), expected)
            # As a resume does: forwards and backwards, after having looked ahead.
            for first in (NUM_SAMPLES // BATCH_SIZE + 1, 3, 20, STEPS):
                last = min(first + 3, STEPS)
                assert_all_equal(serve(prefetch, first, last), expected[first - 1 : last])
            prefetch.close()
    uids = [batch.segments["uid"].values.tolist() for batch in expected]
    seen = Counter(uid for batch in uids for uid in batch)
    assert len(seen) == NUM_SAMPLES
    assert set(seen.values()) == {EPOCHS, EPOCHS + 1}, "the last batch wraps into one epoch more"
    assert len({tuple(batch) for batch in uids}) == STEPS, "two batches are the same"


def test_evaluations_in_between_change_no_batch_and_are_equal_themselves_also_with_cached_tokens(
    config: dict[str, Any], tmp_path: Path
) -> None:
    tokenization = {"name": "parallel", "workers": 0, "cache_dir": str(tmp_path / "cache")}
    with ExitStack() as stack:
        plain = Parts(config, stack, prefetch="core/serial")
        expected, scores = plain.serial(), plain.evaluate()
        assert len(scores) == -(-30 // BATCH_SIZE)
        Parts(config, stack, tokenization=tokenization)
        for depth in DEPTHS:
            parts = Parts(config, stack, tokenization=tokenization, prefetch={"name": "async", "depth": depth})
            assert "from the cache" in str(parts.source.summary()["notes"])
            prefetch = parts.ahead(depth)
            prefetch.start(1)
            for step in range(1, STEPS + 1):
                assert_batches_equal(prefetch.next(step), expected[step - 1])
                if step % 4 == 0:
                    assert_all_equal(parts.evaluate(), scores)
            prefetch.close()


def test_a_mixture_whose_datasets_wrap_at_different_steps_is_equal(
    config: dict[str, Any], spurline_chat_file: Path
) -> None:
    held_out = config["data"]["eval"]
    mixture = [{"path": str(spurline_chat_file), "weight": 0.7}, {"path": held_out, "weight": 1.3}]
    config["data"] = {**config["data"], "train": mixture}
    with ExitStack() as stack:
        expected = Parts(config, stack).serial()
        per_epoch = round(0.7 * NUM_SAMPLES) + round(1.3 * 30)
        assert len(expected) == -(-per_epoch * EPOCHS // BATCH_SIZE)
        prefetch = Parts(config, stack).ahead(2)
        assert_all_equal(serve(prefetch, 1, len(expected)), expected)
        prefetch.close()
