"""Which settings a resume may change, and what it says about those that did."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bare_components import OtherTableConfig
from fake_plugins import FakePlugins, of_kind

from spurline import load_config
from spurline.config.compare import Difference, differences
from spurline.config.loading import LoadedConfig
from spurline.config.section import OnResume, Section
from spurline.errors import CheckpointError
from spurline.plugins.host import InstalledPlugin
from spurline.protocols.prefetch import PrefetchConfig
from spurline.run.checkpoints.changes import PermittedChanges, ResumeRequest
from spurline.run.checkpoints.checkpoint import Checkpoint

pytestmark = pytest.mark.usefixtures("bare")

BASE: dict[str, Any] = {
    "model": {"path": "some/model"},
    "data": {"train": {"path": "a.txt"}},
    "steps": 100,
    "trackers": [],
}
FREE, TO_ROUNDING, BY_NAME, REFUSED = OnResume.FREE, OnResume.TO_ROUNDING, OnResume.BY_NAME, OnResume.REFUSED


def merged(base: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The config with the setting at a dotted path replaced."""
    first, _, rest = path.partition(".")
    if not rest:
        return {**base, first: value}
    inner = base.get(first, {})
    return {**base, first: merged({"name": inner} if isinstance(inner, str) else inner, rest, value)}


def found(
    base: dict[str, Any], available: Mapping[str, InstalledPlugin] | None = None, **changes: Any
) -> list[Difference]:
    changed = base
    for path, value in changes.items():
        changed = merged(changed, path.replace("__", "."), value)
    before = load_config(base, available=available).resolved()
    return differences(before, load_config(changed, recorded=True, available=available).config)


def test_equal_configs_have_no_differences() -> None:
    assert found(BASE) == []


@pytest.mark.parametrize(
    ("path", "value", "key", "mark"),
    [
        ("run_dir", "elsewhere", "run_dir", FREE),
        ("data", {"train": {"path": "moved/a.txt"}}, "data.train.0.path", FREE),
        ("data.eval", "held-out.txt", "data.eval.0", FREE),
        ("trackers", ["noted"], "trackers.0", FREE),
        ("steps", 200, "steps", FREE),
        ("checkpoint", {"every_steps": 7}, "checkpoint.every_steps", FREE),
        ("evaluation", {"batch_size": 3}, "evaluation.batch_size", FREE),
        ("tokenization", "models/bytes", "tokenization", FREE),
        ("backend.rows_per_microbatch", 1, "backend.rows_per_microbatch", TO_ROUNDING),
        ("collator", "padded", "collator", TO_ROUNDING),
        ("collator.max_tokens", 4096, "collator.max_tokens", TO_ROUNDING),
        ("steps", 50, "steps", BY_NAME),
        ("optimizer.learning_rate", 0.1, "optimizer.learning_rate", BY_NAME),
        ("optimizer.betas", [0.9, 0.99], "optimizer.betas", BY_NAME),
        ("optimizer.max_grad_norm", None, "optimizer.max_grad_norm", BY_NAME),
        ("schedule", "falling", "schedule", BY_NAME),
        ("schedule.warmup_steps", 3, "schedule.warmup_steps", BY_NAME),
        ("source.keep", 3, "source.keep", BY_NAME),
        ("model.path", "other/model", "model.path", BY_NAME),
        ("seed", 1, "seed", REFUSED),
        ("batch_size", 8, "batch_size", REFUSED),
        ("loss", "squared", "loss", REFUSED),
        ("reduction", "sequence_mean", "reduction", REFUSED),
        ("data.max_length", 7, "data.max_length", REFUSED),
        ("data.order", "sequential", "data.order", REFUSED),
        ("source", "repeated", "source", REFUSED),
        ("backend", "other_table", "backend", REFUSED),
        ("backend.part", {"size": 2}, "backend.part", REFUSED),
    ],
)
def test_each_setting_is_in_its_class(path: str, value: Any, key: str, mark: OnResume) -> None:
    marks = {change.key: change.mark for change in found(BASE, **{path: value})}
    assert marks[key] is mark


def test_a_mark_within_a_section_that_has_none_counts() -> None:
    squared = {**BASE, "loss": "squared"}
    assert {change.key: change.mark for change in found(squared, loss__scale={"factor": 2.0})} == {
        "loss.scale.factor": BY_NAME
    }


class SwiftConfig(PrefetchConfig):
    name: str = "swift"


class SwiftSection(Section):
    speed: int = 3
    """How fast."""


def test_enabling_a_plugin_is_one_change_with_what_it_replaces_and_its_section(plugins: FakePlugins) -> None:
    available = plugins.add(
        "swift", config=SwiftSection, register=lambda registry: registry.add(SwiftConfig, "m:C", default=True)
    )
    changes = {change.key: change.mark for change in found(BASE, available, plugins=["swift"])}
    assert changes == {"plugins": BY_NAME, "prefetch": FREE}


def test_plugins_that_go_with_a_refused_component_are_to_be_set_back_with_it(plugins: FakePlugins) -> None:
    register = lambda registry: registry.add(of_kind(OtherTableConfig, "backend"), "m:C", name="own")  # noqa: E731
    available = plugins.add("owner", register=register)
    owned = {**BASE, "plugins": ["owner"], "backend": "own"}

    def load(config: dict[str, Any], *overrides: str) -> LoadedConfig:
        return load_config(config, overrides, available=available)

    for before, now in ((owned, BASE), (BASE, owned)):
        checkpoint = Checkpoint(Path("c"), {"step": 40, "config": load(before).resolved()})
        with pytest.raises(CheckpointError, match=r"backend: .*\n  plugins: .*\nSet these back") as raised:
            PermittedChanges(checkpoint, load(now), ResumeRequest())
        assert "allow" not in str(raised.value)
    # A change beside them may still be allowed.
    with pytest.raises(CheckpointError, match=r"allow_change=\['optimizer.learning_rate'\]"):
        PermittedChanges(checkpoint, load(owned, "optimizer.learning_rate=0.5"), ResumeRequest())


def test_steps_may_become_epochs_by_name_only() -> None:
    changes = {change.key: change.mark for change in found(BASE, steps=None, epochs=1)}
    assert changes == {"steps": BY_NAME, "epochs": BY_NAME}


def test_config_survives_json_and_still_equals_itself(tmp_path: Path) -> None:
    loaded = load_config({**BASE, "run_dir": str(tmp_path)})
    stored = json.loads(json.dumps(loaded.resolved()))
    assert differences(stored, loaded.config) == []


def permit(now: dict[str, Any], *allowed: str, history: tuple[dict[str, Any], ...] = ()) -> PermittedChanges:
    manifest = {"step": 40, "config": load_config(BASE).resolved(), "history": list(history)}
    checkpoint = Checkpoint(Path("runs/x/checkpoints/step-00000040"), manifest)
    return PermittedChanges(checkpoint, load_config(now), ResumeRequest("auto", allowed))


def test_less_memory_after_running_out_of_it_is_a_note() -> None:
    changes = permit(merged(BASE, "backend.max_tokens_per_microbatch", 512))
    assert changes.notes() == [
        "Changed since the checkpoint: backend.max_tokens_per_microbatch: None -> 512 (equal to rounding, not bit for "
        "bit; with dropout also other random numbers)."
    ]
    assert changes.history() == ({"step": 40, "key": "backend.max_tokens_per_microbatch", "before": None, "now": 512},)


def test_a_refusal_prints_the_command_that_would_go_on(tmp_path: Path) -> None:
    path = tmp_path / "my run.yaml"
    path.write_text(json.dumps(BASE))
    loaded = load_config(path, ["optimizer.learning_rate=1e-4", "schedule=falling"])
    checkpoint = Checkpoint(Path("c"), {"step": 40, "config": load_config(BASE).resolved()})
    with pytest.raises(CheckpointError) as raised:
        PermittedChanges(checkpoint, loaded, ResumeRequest("c", ("optimizer.learning_rate",)))
    text = str(raised.value)
    assert "  schedule: flat -> falling" in text
    assert "learning_rate: " not in text
    assert (
        f"spurline train '{path}' --set optimizer.learning_rate=1e-4 --set schedule=falling --resume c "
        "--allow-change optimizer.learning_rate --allow-change schedule"
    ) in text


def test_an_allowed_change_is_kept_in_the_history() -> None:
    earlier = {"step": 8, "key": "schedule", "before": {"name": "falling"}, "now": {"name": "flat"}}
    changes = permit(merged(BASE, "optimizer.learning_rate", 0.5), "optimizer", history=(earlier,))
    assert changes.notes() == [
        "Changed at step 8: schedule: falling -> flat.",
        "Changed since the checkpoint: optimizer.learning_rate: 2e-05 -> 0.5 (allowed by name).",
    ]
    assert changes.history() == (
        earlier,
        {"step": 40, "key": "optimizer.learning_rate", "before": 2e-5, "now": 0.5},
    )


def test_the_same_command_may_run_again_once_the_change_is_saved() -> None:
    done = {"step": 8, "key": "optimizer.learning_rate", "before": 1, "now": 2e-5}
    assert permit(BASE, "optimizer.learning_rate", history=(done,)).history() == (done,)


def test_other_data_cannot_be_allowed_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"cannot change: .*\n  seed: 0 -> 5\n.*spurline export") as raised:
        permit(merged(BASE, "seed", 5), "seed")
    assert "--allow-change" not in str(raised.value)


def test_a_change_that_may_be_allowed_is_not_advised_with_one_that_was_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(BASE))
    checkpoint = Checkpoint(Path("c"), {"step": 40, "config": load_config(path).resolved()})
    now = load_config(path, ["seed=5", "optimizer.learning_rate=0.5"])
    with pytest.raises(CheckpointError, match=r"with: --allow-change optimizer.learning_rate$"):
        PermittedChanges(checkpoint, now, ResumeRequest())


def test_a_name_that_is_no_setting_gets_a_near_miss() -> None:
    with pytest.raises(CheckpointError, match=r"no setting of this name. Did you mean 'optimizer.learning_rate'\?"):
        permit(merged(BASE, "optimizer.learning_rate", 0.5), "optimizer.learning_rat")


def test_a_name_that_did_not_change_is_an_error() -> None:
    with pytest.raises(CheckpointError, match=r"it is what it was .* since the checkpoint: optimizer.momentum."):
        permit(merged(BASE, "optimizer.momentum", 0.5), "optimizer.weight_decay", "optimizer.momentum")


def test_component_state_keeps_arrays_and_structure(tmp_path: Path) -> None:
    import numpy as np

    from spurline.run.checkpoints.state_files import read_state, write_state

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
    from spurline.run.checkpoints.state_files import write_state

    with pytest.raises(RunFailedError, match="state of source/mine cannot be saved"):
        write_state(tmp_path / "source" / "mine", {"cursor": object()})
