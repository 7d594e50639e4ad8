"""`--set key.path=value` on top of a file, for every way the file may be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_files import message, resolved

from spurline import load_config
from spurline.errors import ConfigError

pytestmark = pytest.mark.usefixtures("bare")


def test_values_are_read_as_yaml() -> None:
    got = resolved("optimizer.betas=[0.8, 0.9]", "optimizer.max_grad_norm=null", "data.order=sequential")
    assert resolved("optimizer.learning_rate=1e-4")["optimizer"]["learning_rate"] == 1e-4
    assert got["optimizer"]["betas"] == [0.8, 0.9]
    assert got["optimizer"]["max_grad_norm"] is None
    assert got["data"]["order"] == {"name": "sequential"}
    assert resolved("collator={name: padded, pad_side: left}")["collator"]["pad_side"] == "left"


def test_setting_inside_a_component_written_by_name_keeps_the_name() -> None:
    got = resolved("collator.pad_side=left", collator="padded")["collator"]
    assert (got["name"], got["pad_side"]) == ("padded", "left")


def test_component_may_be_exchanged_and_then_set() -> None:
    got = resolved("collator=padded", "collator.pad_side=left", collator={"name": "packed", "max_tokens": 5000})
    assert got["collator"]["pad_side"] == "left"


@pytest.mark.parametrize("path", ["data.train.split", "data.train.0.split"])
@pytest.mark.parametrize("train", ["rows.jsonl", {"path": "rows.jsonl"}])
def test_dataset_written_in_short_can_be_set_with_and_without_index(path: str, train: Any) -> None:
    (dataset,) = resolved(f"{path}=train[:10]", data={"train": train})["data"]["train"]
    assert (dataset["path"], dataset["split"]) == ("rows.jsonl", "train[:10]")


def test_nested_component_in_a_mapping_keeps_its_name() -> None:
    evaluations = {"score": {"name": "held_out", "data": "b.jsonl"}}
    got = resolved("evaluations.score.batch_size=3", evaluations=evaluations)["evaluations"]["score"]
    assert (got["name"], got["batch_size"]) == ("held_out", 3)


@pytest.mark.parametrize("override", ["steps", "=3", "a..b=3", ".a=3", "a.=3", ""])
def test_text_that_is_no_override_says_how_to_write_one(override: str) -> None:
    assert message(override) == f"--set: '{override}' is not KEY=VALUE, such as 'optimizer.learning_rate=1e-4'."


def test_value_that_is_no_yaml_names_its_key() -> None:
    assert "'steps=[' is not valid YAML" in message("steps=[")


def test_index_out_of_range_says_what_there_is() -> None:
    assert "'2' must be an index from 0 to 0" in message("data.train.2.split=a", data={"train": ["x"]})
    assert "'2' must be an index from 0 to 0" in message("data.train.2.split=a", data={"train": "x"})
    assert "'split' must be an index" in message("data.train.split=a", data={"train": ["x"]})
    assert "in an empty list" in message("data.train.0=a", data={"train": []})


@pytest.mark.parametrize("settings", [{}, {"trackers": [5]}])
def test_path_through_a_plain_value_is_refused(settings: dict[str, Any]) -> None:
    key = "trackers.0" if settings else "steps"
    assert f"'{key.rpartition('.')[2]}' is the value" in message(f"{key}.x=1", **settings)


def test_problem_of_an_override_names_the_override_and_not_the_line_it_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {train: a}\nsteps: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["steps=0"])
    assert str(caught.value) == f"{path}: steps is 0: input should be greater than 0. (from --set steps=0)"
