"""Runs that learn from teachers go on after a stop as if nothing had happened, and learn what the teacher knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from async_runs import IN_PROCESS, asynchronous
from run_helpers import Config, assert_pieces_equal_the_whole, train, write_rows
from served_teachers import served

from spurline_models.testing import write_tiny_model, write_tiny_moe_model


@pytest.fixture
def frozen(tmp_path: Path) -> dict[str, Any]:
    return {"teacher": {"path": str(write_tiny_model(tmp_path / "teacher", seed=5))}}


def learning(config: Config, frozen: dict[str, Any], **changes: Any) -> Config:
    model = {**config["model"], "frozen": frozen}
    return {**config, "plugins": [*config.get("plugins", []), "distillation"], "model": model, **changes}


PRIVILEGED = {"name": "privileged_prompt", "text": "{question} It is {reference}."}
HOWS: dict[str, dict[str, Any]] = {
    "advantages": {"advantage": {"name": "teacher", "reward": "grpo", "reward_weight": 0.1}},
    # The teacher has another prompt than the engine, so its experts are not those that the engine chose.
    "privileged": {
        "router_replay": True,
        "advantage": {"name": "teacher", "teacher": "reference"},
        "scorers": [{**PRIVILEGED, "role": "reference"}],
    },
    # A teacher needs no second sample to compare an answer with.
    "distributions": {"samples_per_prompt": 1},
}


@pytest.mark.parametrize("how", HOWS)
def test_a_stopped_run_on_the_policys_own_answers_goes_on_as_the_whole(
    rl_config: Config, frozen: dict[str, Any], tmp_path: Path, how: str
) -> None:
    loss = {"loss": {"name": "distillation", "divergence": "reverse_kl", "top_k": 8}} if how == "distributions" else {}
    if how == "privileged":
        frozen, rl_config["model"] = {}, {"path": str(write_tiny_moe_model(tmp_path / "experts"))}
    config = learning(rl_config, frozen, source={**rl_config["source"], **HOWS[how]}, **loss)
    assert_pieces_equal_the_whole(config, tmp_path, stops=[1])


@pytest.mark.processes
def test_a_stopped_asynchronous_run_with_a_served_teacher_that_sees_the_solution_goes_on_as_the_whole(
    rl_config: Config, spurline_tiny_model: Path, tmp_path: Path
) -> None:
    with served(spurline_tiny_model) as server:
        source = {
            "max_staleness": 0,
            "engine": IN_PROCESS,
            "advantage": {"name": "teacher", "served": True},
            "scorers": [PRIVILEGED, {"name": "served_teacher", "urls": [server.url], "top_k": 3}],
        }
        assert_pieces_equal_the_whole(asynchronous(learning(rl_config, {}), **source), tmp_path, stops=[1])


def test_the_divergence_from_the_teacher_falls_on_the_tokens_of_the_data_and_a_stopped_run_is_the_whole(
    base_config: Config, frozen: dict[str, Any], tmp_path: Path
) -> None:
    # Each row has its own teacher.
    frozen["another"] = {"path": str(write_tiny_model(tmp_path / "another", seed=6))}
    teachers = {"odd": "teacher", "even": "another"}
    loss = {"name": "distillation", "divergence": "jensen_shannon", "temperature": 1.5, "cross_entropy": 0.1}
    rows = [json.loads(line) for line in Path(base_config["data"]["train"]).read_text(encoding="utf-8").splitlines()]
    named = [{**row, "odd": number % 2, "even": number % 2 == 0} for number, row in enumerate(rows)]
    path = str(write_rows(tmp_path / "taught.jsonl", named))
    data = {**base_config["data"], "train": path, "eval": path}
    evaluation = {"every_steps": 4}
    checkpoint = {"every_steps": 4, "keep_best": "eval/loss"}
    config = learning(base_config, frozen, steps=8, data=data, evaluation=evaluation, checkpoint=checkpoint)
    config |= {"loss": {**loss, "teachers": teachers}, "source": {"name": "sft", "carry": [*teachers]}}
    assert_pieces_equal_the_whole(config, tmp_path, stops=[3])
    lines = train({**config, "run_dir": str(tmp_path / "again")}).lines
    assert lines[-1]["distillation/divergence"] < lines[0]["distillation/divergence"]
    assert {"eval/loss", "eval/objective", "eval/distillation/divergence"} <= lines[-1].keys()
