"""Which settings a resume may change, and what it says about those that did."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from config_files import merged
from fake_plugins import FakePlugins

from spurline import load_config
from spurline.config.compare import Difference, differences
from spurline.config.section import OnResume, Section
from spurline.errors import CheckpointError
from spurline.plugins.host import InstalledPlugin
from spurline.protocols.prefetch import PrefetchConfig
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.checkpoints.resume import Resume, ResumeRequest, find_resume
from spurline.run.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("bare")

BASE: dict[str, Any] = {
    "model": {"path": "some/model"},
    "data": {"train": {"path": "a.txt"}},
    "steps": 100,
    "trackers": [],
}
FREE, TO_ROUNDING, BY_NAME, REFUSED = OnResume.FREE, OnResume.TO_ROUNDING, OnResume.BY_NAME, OnResume.REFUSED


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


def test_steps_may_become_epochs_by_name_only() -> None:
    changes = {change.key: change.mark for change in found(BASE, steps=None, epochs=1)}
    assert changes == {"steps": BY_NAME, "epochs": BY_NAME}


def test_config_survives_json_and_still_equals_itself() -> None:
    loaded = load_config(BASE)
    assert differences(json.loads(json.dumps(loaded.resolved())), loaded.config) == []


Permit = Callable[..., Resume]


@pytest.fixture
def permit(tmp_path: Path) -> Permit:
    """Returns the resume of a config file with overrides, from a checkpoint of BASE at step 40."""
    base = {**BASE, "run_dir": str(tmp_path)}
    path = tmp_path / "my run.yaml"
    path.write_text(json.dumps(base))

    def resume(*overrides: str, allowed: tuple[str, ...] = (), history: Sequence[Mapping[str, Any]] = ()) -> Resume:
        facts = {"config": load_config(base).resolved(), "versions": {}, "updates": {}, "history": list(history)}
        CheckpointStore(tmp_path / "checkpoints").save(40, lambda folder: None, facts)
        return find_resume(RunDirectory(tmp_path), load_config(path, overrides), ResumeRequest("auto", allowed))

    return resume


def test_less_memory_after_running_out_of_it_is_a_note(permit: Permit) -> None:
    resume = permit("backend.max_tokens_per_microbatch=512")
    (note,) = (note for note in resume.notes if "max_tokens_per_microbatch: None -> 512" in note)
    assert "differ by rounding errors" in note
    assert resume.history == ({"step": 40, "key": "backend.max_tokens_per_microbatch", "before": None, "now": 512},)


def test_a_refusal_prints_the_command_that_would_go_on(permit: Permit) -> None:
    with pytest.raises(CheckpointError) as raised:
        permit("optimizer.learning_rate=1e-4", "schedule=falling", allowed=("optimizer.learning_rate",))
    text = str(raised.value)
    assert "  schedule: flat -> falling" in text
    assert "learning_rate: " not in text
    assert text.endswith(
        "my run.yaml' --set optimizer.learning_rate=1e-4 --set schedule=falling "
        "--allow-change optimizer.learning_rate --allow-change schedule"
    )


def test_an_allowed_change_is_kept_in_the_history(permit: Permit) -> None:
    earlier = {"step": 8, "key": "schedule", "before": {"name": "falling"}, "now": {"name": "flat"}}
    resume = permit("optimizer.learning_rate=0.5", allowed=("optimizer",), history=[earlier])
    assert [note for note in resume.notes if "Changed" in note] == [
        "Changed at step 8: schedule: falling -> flat.",
        "Changed since the checkpoint: optimizer.learning_rate: 2e-05 -> 0.5 (permitted by --allow-change).",
    ]
    new = {"step": 40, "key": "optimizer.learning_rate", "before": 2e-5, "now": 0.5}
    assert resume.history == (earlier, new)
    # The same command may run again, from a checkpoint that has the change.
    assert permit(allowed=("optimizer.learning_rate",), history=[new]).history == (new,)


def test_other_data_cannot_be_allowed_by_name(permit: Permit) -> None:
    with pytest.raises(CheckpointError, match=r"cannot change:\n  seed: 0 -> 5\n.*spurline export") as raised:
        permit("seed=5", allowed=("seed",))
    assert "--allow-change" not in str(raised.value)


def test_a_name_that_did_not_change_is_an_error_with_a_near_miss(permit: Permit) -> None:
    with pytest.raises(CheckpointError, match=r"learning_rat: no setting .* Did you mean 'optimizer.learning_rate'\?"):
        permit("optimizer.learning_rate=0.5", allowed=("optimizer.learning_rat",))
