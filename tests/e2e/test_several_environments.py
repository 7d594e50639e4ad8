"""Runs with several environments, among which rows choose: accounting, metrics, resume, held-out scores, errors."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from async_runs import assert_equals_synchronous, asynchronous, comparable
from fated import two_environments, write_prompts
from reward_functions import in_process
from run_helpers import Config, Spurline, assert_problem, assert_same_weights, train, write_rows

from spurline import load_config
from spurline.errors import ConfigError
from spurline_rl.kept_rollouts import KeptRollouts

ADVANTAGE = {"name": "by_environment", "advantages": {"twice": {"name": "reinforce_pp"}}, "other": "rloo"}


@pytest.fixture
def several_config(rl_config: Config, tmp_path: Path) -> Config:
    write_prompts(tmp_path / "fated.jsonl")
    rl_config |= {"data": {"train": str(tmp_path / "fated.jsonl"), "max_length": 128}}
    rl_config["source"] |= {
        "environment": two_environments("fated", in_process("fated:fated")),
        "advantage": ADVANTAGE,
        "reward_weights": {"both": 0.5},
        "zero_variance": "refill",
        "faults": {"retries": 1, "max_quarantined": 64},
    }
    return rl_config


def sums(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines)


def test_environments_of_different_shape_in_one_run_are_exact_without_staleness_and_over_a_resume(
    several_config: Config,
) -> None:
    config = asynchronous(several_config, max_concurrent_groups=3)
    run = assert_equals_synchronous(config)
    lines = run.lines
    for name in ("drawn", "filtered", "quarantined"):
        parts = {label: sums(lines, f"env/{label}/{name}") for label in ("once", "twice")}
        assert sum(parts.values()) == sums(lines, f"groups/{name}")
        assert min(parts.values()) > 0, (name, parts)
    assert {line["env/twice/turns"] for line in lines if "env/twice/turns" in line} == {2.0}
    assert max(line.get("env/twice/length", 0.0) for line in lines) <= 6 < 2 * 6
    lost = Counter(prompt.info["environment"] for prompt in KeptRollouts(run.run_dir).given_up())
    assert lost == {label: sums(lines, f"env/{label}/quarantined") for label in ("once", "twice")}
    kept = [*KeptRollouts(run.run_dir).attempts()]
    for attempt in kept:
        assert attempt.rewards.keys() == ({"fated"} if attempt.info["environment"] == "once" else {"both"})
        total = attempt.rewards.get("fated", 0.0) + 0.5 * attempt.rewards.get("both", -1.5) + 0.75
        assert attempt.reward == pytest.approx(total, abs=1e-6)
    for stop in (3, None):
        pieces = train(config, name="pieces", stop_after=stop)
    assert comparable(pieces) == comparable(run)
    assert_same_weights(pieces, run)


def test_a_curriculum_weighs_environments_that_datasets_name_and_held_out_scores_are_told_apart(
    several_config: Config, tmp_path: Path
) -> None:
    of: dict[str, Config] = {}
    for label, count in (("once", 6), ("twice", 12)):
        write_prompts(tmp_path / f"{label}.jsonl", count, ("unnamed",))
        of[label] = {"path": str(tmp_path / f"{label}.jsonl"), "constants": {"environment": label}}
    order = {"name": "success_mixture", "column": "environment", "shares": {"once": 0.5}}
    several_config["data"] = {"train": [*of.values()], "eval": [*of.values()], "max_length": 128, "order": order}
    several_config |= {"plugins": ["curricula", "objectives"], "steps": 3}
    several_config["source"] |= {
        "advantage": {**ADVANTAGE, "other": "turn_grpo"},
        "zero_variance": "keep",
        "held_out": {
            "samples_per_prompt": 2,
            "temperature": 1.0,
            "success": {"at_least": 0.5},
            "success_by_environment": {"twice": {"reward": "both", "at_least": 2}},
        },
    }
    several_config["evaluation"] = {"every_steps": 3}
    several_config["checkpoint"] |= {"keep_best": "eval/env/once/pass@1"}
    run = train(several_config)
    scores = run.lines[-1]
    assert {line[f"order/weight/{label}"] for line in run.lines[:1] for label in ("once", "twice")} != {0.5}
    assert sums(run.lines, "env/once/drawn") == pytest.approx(sums(run.lines, "groups/drawn") / 2, abs=3)
    for name in ("pass@1", "pass@2"):
        once, twice = (scores[f"eval/env/{label}/{name}"] for label in ("once", "twice"))
        assert scores[f"eval/{name}"] == pytest.approx((6 * once + 12 * twice) / 18)
        assert once > 0 == twice
    assert scores["eval/failed"] >= 3
    # With turn_grpo, groups with equal returns teach too.
    assert not [name for name in scores if name.endswith("zero_variance")]
    page = (run.run_dir / "report.html").read_text(encoding="utf-8")
    assert "Held-out pass@1 of environments over steps" in page


def test_a_row_without_an_environment_is_an_error_before_training_that_names_row_and_labels(
    several_config: Config, tmp_path: Path, spurline: Spurline
) -> None:
    path = tmp_path / "fated.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] * 60
    place = "fated.jsonl:1201: the column 'environment'"
    for label, said, hint in (
        ("twise", f"{place} is text ('twise')", "Did you mean 'twice'?"),
        (None, f"{place}, which chooses the environment, is missing", "The row has: environment, fate, messages"),
    ):
        write_rows(path, [*rows[:1200], {**rows[0], "environment": label}, *rows])
        for command in ("plan", "train"):
            code, out, err = spurline(command, several_config)
            told = " ".join((out + err).split())
            assert code
            for each in (said, hint, "Environments: once, twice"):
                assert each in told


def test_a_plan_knows_which_environments_show_prompts_and_which_terms_they_declare(
    several_config: Config, tmp_path: Path, spurline: Spurline, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {label: tmp_path / f"{label}.jsonl" for label in ("once", "twice")}
    for label, path in paths.items():
        write_rows(path, [{"prompt": "sort 21", "fate": "trained", "environment": label}] * 8)
    several_config["data"]["train"] = [*map(str, paths.values())]
    code, out, err = spurline("plan", several_config)
    told = " ".join((out + err).split())
    assert not code
    assert "once: 'prompt' is plain text" in told
    assert "twice: 'prompt' is plain text" not in told
    monkeypatch.setattr("fated.Twice.reward_terms", ("both", "brief"), raising=False)
    several_config["source"] |= {"environment": "fated:Twice", "advantage": "grpo"}
    several_config["data"]["eval"] = str(paths["twice"])
    code, out, err = spurline("plan", several_config)
    assert code
    assert "held_out.success does not say which reward decides" in " ".join((out + err).split())


@pytest.mark.parametrize(
    ("changes", "key", "said"),
    [
        ({"environment": {"limits": {"twise": {}}}}, "environment.limits.twise", "Did you mean 'twice'"),
        (
            {"environment": {"limits": {"once": {"max_new_tokens": 7}}}},
            "environment.limits.once.max_new_tokens",
            "more than source.sampling.max_new_tokens: 6",
        ),
        ({"overlong": {"buffer_tokens": 4}}, "overlong.buffer_tokens", "the smallest limit of an environment: 3"),
        ({"advantage": {"advantages": {"onze": "grpo"}}}, "advantage.advantages.onze", "Did you mean 'once'"),
        ({"advantage": {"other": "gae"}}, "advantage.advantages", "critic"),
        ({"environment": "fated:Twice"}, "advantage.name", "one environment"),
        ({"held_out": {"success": {"reward": "fated"}}}, "held_out.success.reward", "environment 'twice'"),
        ({"held_out": {"success_by_environment": {"onze": {}}}}, "held_out.success_by_environment.onze", "'once'"),
    ],
)
def test_settings_that_fit_no_environment_are_refused_with_the_nearest_name(
    several_config: Config, changes: Mapping[str, Any], key: str, said: str
) -> None:
    source = several_config["source"]
    several_config["data"]["eval"] = several_config["data"]["train"]
    source["environment"]["environments"]["twice"] = {"name": "tools", "rewards": {"fatet": "exact_match"}}
    del source["reward_weights"]
    for name, value in changes.items():
        together = isinstance(value, dict) and isinstance(source.get(name), dict)
        source[name] = {**source[name], **value} if together else value
    with pytest.raises(ConfigError) as caught:
        load_config(several_config)
    assert_problem(caught, key=f"source.{key}", fix=said)
