"""State that plugins keep: under their own names, whole or refused with the plugin and the name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spurline.errors import CheckpointError, HookFailedError, PluginError, RunFailedError
from spurline.run.checkpoints.checkpoint import CheckpointStore, open_checkpoint
from spurline.run.checkpoints.hook_state import HookStates
from spurline.run.checkpoints.state_files import write_state


class Average:
    """A state of one array."""

    def __init__(self, values: Any = (1.0, 2.0)) -> None:
        self.values = np.asarray(values)

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values = state["values"] + 0


def saved(states: HookStates, folder: Path) -> Any:
    """A checkpoint with what these keep."""

    def write(target: Path) -> None:
        for name, state, owner in states.states():
            write_state(target / name, state, owner)

    return open_checkpoint(CheckpointStore(folder).save(3, write, {"config": {}, "versions": {}}))


def test_states_are_saved_by_plugin_and_name_and_restored_where_they_are_kept_again(tmp_path: Path) -> None:
    states = HookStates()
    states.keep("ema", "weights", Average([1.0]))
    states.keep("other", "weights", Average([2.0]))
    states.keep(None, "mine.v2", Average([3.0]))
    assert states.close() == []
    checkpoint = saved(states, tmp_path)
    assert {"hooks/ema/weights.safetensors", "hooks/other/weights.json", "hooks/mine.v2.json"} <= {
        *checkpoint.manifest["files"]
    }
    again, early, late = HookStates(), Average(), Average()
    again.keep("other", "weights", early)
    again.restore(checkpoint)
    again.keep("ema", "weights", late)
    assert (early.values.tolist(), late.values.tolist()) == ([2.0], [1.0])
    assert again.close() == [
        "The checkpoint has the state 'mine.v2', which nothing in this run uses. It is not restored."
    ]


def test_a_plugin_that_is_new_or_gone_is_a_note_on_resume_and_no_error(tmp_path: Path) -> None:
    states = HookStates()
    states.keep("gone", "weights", Average())
    again = HookStates()
    again.restore(saved(states, tmp_path))
    again.keep("new", "weights", Average())
    assert again.close() == [
        "The state 'weights' of plugin 'new' is new in this run.",
        "The checkpoint has the state 'weights' of plugin 'gone', which nothing in this run uses. It is not restored.",
    ]


@pytest.mark.parametrize(
    ("name", "state", "message"),
    [
        ("weights", Average(), r"keep_state\('weights'\): another state has this name"),
        ("x", {"values": 1}, r"was given \{'values': 1\}.*state_dict"),
        ("x", Average, "was given <class "),
        ("../x", Average(), "use only letters, digits"),
        ("", Average(), "use only letters, digits"),
        (3, Average(), "use only letters, digits"),
    ],
)
def test_what_cannot_be_kept_is_refused(name: Any, state: Any, message: str) -> None:
    states = HookStates()
    states.keep("ema", "weights", Average())
    with pytest.raises(PluginError, match=message):
        states.keep("ema", name, state)


def test_keeping_state_once_training_began_is_refused_because_a_resume_would_miss_it() -> None:
    states = HookStates()
    states.close()
    with pytest.raises(PluginError, match=r"was called after training began.*Call it in on_run_start"):
        states.keep("late", "weights", Average())


def test_values_that_cannot_be_saved_or_restored_name_the_plugin_and_the_state(tmp_path: Path) -> None:
    states = HookStates()
    states.keep("ema", "weights", Average(["text"]))
    with pytest.raises(
        RunFailedError, match=r"^The state 'weights' of plugin 'ema' cannot be saved: values is an array of"
    ):
        saved(states, tmp_path / "bad")

    class Broken(Average):
        def state_dict(self) -> dict[str, object]:
            raise KeyError("lost")

    states = HookStates()
    states.keep("ema", "weights", Broken())
    with pytest.raises(
        HookFailedError, match=r"^The state 'weights' of plugin 'ema' cannot be saved: KeyError: 'lost'"
    ):
        saved(states, tmp_path / "broken")
    assert not list((tmp_path / "broken").glob("step-*")), "half a checkpoint was left"

    class Renamed(Average):
        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.values = state["numbers"]

    states, again = HookStates(), HookStates()
    states.keep("ema", "weights", Average())
    again.restore(saved(states, tmp_path / "good"))
    with pytest.raises(
        CheckpointError, match=r"the state 'weights' of plugin 'ema' cannot be restored: KeyError: 'numbers'"
    ):
        again.keep("ema", "weights", Renamed())
