"""Which settings a resume may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spurline import load_config
from spurline.config.compare import differences

BASE: dict[str, Any] = {
    "model": {"path": "some/model"},
    "data": {"train": {"path": "a.jsonl"}},
    "steps": 100,
    "trackers": [],
}


def changed(**new: Any) -> dict[str, bool]:
    before = load_config(BASE).resolved()
    return {change.key: change.allowed for change in differences(before, load_config({**BASE, **new}).config)}


def test_equal_configs_have_no_differences() -> None:
    assert changed() == {}


@pytest.mark.parametrize(
    ("new", "key"),
    [
        ({"run_dir": "elsewhere"}, "run_dir"),
        ({"data": {"train": {"path": "moved/a.jsonl"}}}, "data.train.0.path"),
        ({"trackers": ["tensorboard"]}, "trackers.0.name"),
        ({"steps": 200}, "steps"),
        ({"checkpoint": {"every_steps": 7, "keep_last": 9}}, "checkpoint.every_steps"),
        ({"report": {"enabled": False}}, "report.enabled"),
        ({"backend": {"num_threads": 1}}, "backend.num_threads"),
    ],
)
def test_paths_logging_and_longer_runs_may_change(new: dict[str, Any], key: str) -> None:
    found = changed(**new)
    assert key in found
    assert all(found.values()), found


@pytest.mark.parametrize(
    ("new", "key"),
    [
        ({"seed": 1}, "seed"),
        ({"steps": 50}, "steps"),
        ({"batch_size": 8}, "batch_size"),
        ({"optimizer": {"learning_rate": 0.1}}, "optimizer.learning_rate"),
        ({"collator": "padded"}, "collator.name"),
        ({"loss": "dft"}, "loss.name"),
        ({"data": {"train": {"path": "a.jsonl"}, "max_length": 7}}, "data.max_length"),
        ({"backend": {"precision": "bf16"}}, "backend.precision"),
        ({"model": {"path": "other/model"}}, "model.path"),
    ],
)
def test_whatever_changes_the_training_is_refused_by_name(new: dict[str, Any], key: str) -> None:
    found = changed(**new)
    assert found[key] is False


def test_steps_may_not_become_epochs() -> None:
    found = changed(steps=None, epochs=1)
    assert found == {"steps": False, "epochs": False}


def test_config_survives_json_and_still_equals_itself(tmp_path: Path) -> None:
    import json

    loaded = load_config({**BASE, "run_dir": str(tmp_path)})
    stored = json.loads(json.dumps(loaded.resolved()))
    assert differences(stored, loaded.config) == []


def test_component_state_keeps_arrays_and_structure(tmp_path: Path) -> None:
    import numpy as np

    from spurline.run.checkpoint import read_state, write_state

    state: dict[str, Any] = {
        "groups": [{"tokens": np.arange(5, dtype=np.int32), "uid": "a"}, {"tokens": np.zeros((2, 0), np.float32)}],
        "cursor": 7,
        "nothing": None,
    }
    write_state(tmp_path / "source" / "mine.v1", state)
    write_state(tmp_path / "source" / "mine.v2", {"scalar": np.float64(2).reshape(())})
    assert read_state(tmp_path / "source" / "mine.v2") == {"scalar": np.array(2.0)}
    got: Any = read_state(tmp_path / "source" / "mine.v1")
    assert got["cursor"] == 7
    assert got["nothing"] is None
    assert got["groups"][0]["uid"] == "a"
    for read, written in zip(got["groups"], state["groups"], strict=True):
        assert read["tokens"].dtype == written["tokens"].dtype
        assert np.array_equal(read["tokens"], written["tokens"])


def test_a_state_that_cannot_be_saved_names_its_component(tmp_path: Path) -> None:
    from spurline.errors import RunFailedError
    from spurline.run.checkpoint import write_state

    with pytest.raises(RunFailedError, match="state of source/mine cannot be saved"):
        write_state(tmp_path / "source" / "mine", {"cursor": object()})
