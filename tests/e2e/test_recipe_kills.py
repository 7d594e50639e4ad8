"""kill -9 of each recipe at drawn instants: metrics, weights and kept files end as those of the uninterrupted run.

Two recipes are in every run of the tests, all of them in long ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from string import printable
from typing import Any

import pytest
from async_runs import kept_attempts
from config_files import merged
from every_run import IN_LONG_RUNS, SOAK
from run_helpers import (
    Config,
    KillableProcess,
    assert_same_run,
    kept_steps,
    train,
    write_pairs,
    write_rows,
    write_scorer,
)

from spurline_models.testing import write_tiny_model
from spurline_rl.kept_rollouts import KeptRollouts

EXAMPLES = Path(__file__).parents[2] / "examples"
KILLS = 8 if SOAK else 2
MOST_STEPS = 4
"""Steps that a piece does before it is killed, beyond its first."""


@dataclass(frozen=True)
class Recipe:
    """A run on rows of data or on rollouts, small enough to repeat, with changes."""

    changes: Config
    """Dotted keys with values. Paths begin in a folder with the files of `write_files`."""
    rollouts: bool = False
    in_every_run: bool = False
    rises: tuple[str, ...] = ()
    """Metrics that are above 0 in some step, which show that the run does what it is for."""


def pairs(loss: Any, **changes: Any) -> Config:
    files = {"data.train": "pairs.jsonl", "data.eval": "held_out.jsonl"}
    return {"source": "preference", "loss": loss, **files, **changes}


SCORES: Config = {"plugins": ["reward_models"], "model.head": "score"}
TEACHER = {"plugins": ["distillation"], "model.frozen": {"teacher": {"path": "teacher"}}}
LEVELS = {"plugins": ["curricula"], "data.train": "rows.jsonl", "data.order.column": "level"}
REPLAY = {"share": 0.5, "solved_at": 0.9, "most_prompts": 3}
BENCHMARK = {
    "name": "lm_eval",
    "tasks": ["sort_answers", "sort_choices"],
    "include_path": "examples/data/sort_tasks",
    "limit": 4,
    "every_steps": 3,
}
RECIPES = {
    "teacher": Recipe(
        {**TEACHER, "source.advantage": {"name": "teacher", "reward": "grpo", "reward_weight": 0.1}}, rollouts=True
    ),
    "teacher of whole distributions": Recipe(
        {**TEACHER, "loss": {"name": "distillation", "divergence": "reverse_kl", "top_k": 8}}, rollouts=True
    ),
    "teacher on rows of data": Recipe(
        {**TEACHER, "loss": {"name": "distillation", "divergence": "jensen_shannon"}, "data.eval": "rows.jsonl"}
    ),
    "orpo": Recipe(pairs("orpo")),
    "simpo": Recipe(pairs("simpo")),
    "kto": Recipe(pairs("kto", source="labels")),
    "kto with stored values": Recipe(pairs("kto", source={"name": "labels", "reference": "precompute"})),
    "dpo with stored values": Recipe(
        pairs("dpo", source={"name": "preference", "reference": "precompute"}), in_every_run=True
    ),
    "reward model of pairs": Recipe({**SCORES, **pairs("bradley_terry")}),
    "reward model of steps": Recipe(
        {**SCORES, "source": "scored_steps", "loss": "step_reward", "data.train": "steps.jsonl"},
        rises=("reward_model/accuracy",),
    ),
    "reward of a frozen model": Recipe(
        {
            "plugins": ["reward_models"],
            "model.frozen": {"judge": {"path": "scorer", "head": "score"}},
            "source.environment.rewards.judged": {"name": "model", "role": "judge"},
        },
        rollouts=True,
    ),
    "dppo with top_p": Recipe(
        {
            "plugins": ["objectives"],
            "loss": {"name": "dppo", "threshold_low": 0.001, "threshold_high": 0.001},
            "source.sampling": {"max_new_tokens": 6, "top_p": 0.8, "top_k": 8},
        },
        rollouts=True,
        rises=("policy/clip_fraction_low",),
    ),
    "success mixture with replay": Recipe(
        {**LEVELS, "data.order": {"name": "success_mixture", "column": "level", "reward": "early", "replay": REPLAY}},
        rollouts=True,
        in_every_run=True,
        rises=("order/replay/replayed",),
    ),
    "registered environment": Recipe(
        {
            "source.environment": {
                "name": "gymnasium",
                "id": "Taxi-v4",
                "action": "reward_functions:any_action",
                "max_turns": 3,
            },
            # A turn that is cut off makes no action.
            "source.sampling": {"max_new_tokens": 6, "stop": [*printable]},
            "source.reward_weights": {},
            "source.faults": {"retries": 1, "max_quarantined": 64},
        },
        rollouts=True,
        rises=("groups/quarantined", "episode/turns", "grad_norm"),
    ),
    "mixture of domains": Recipe({**LEVELS, "data.order.name": "mixture", "data.order.shares": {"0": 0.5}}),
    "files in shares": Recipe(
        {"data.train": [{"path": "rows.jsonl", "share": 0.7}, {"path": "others.jsonl", "share": 0.3}]}
    ),
    "benchmarks": Recipe(
        {"plugins": ["evals"], "evaluations.bench": BENCHMARK, "checkpoint.keep_best": "eval/bench/sort_choices/acc"}
    ),
}


def write_files(folder: Path) -> None:
    # Tasks name their rows from there.
    (folder / "examples").symlink_to(EXAMPLES)
    write_pairs(folder / "pairs.jsonl", 30, seed=0)
    write_pairs(folder / "held_out.jsonl", 11, seed=1)
    teacher = write_tiny_model(folder / "teacher", seed=5)
    write_scorer(folder / "scorer", teacher)
    for name, count in (("rows", 14), ("others", 9)):
        said = [(f"say {number} {name}", str(number) * (1 + number % 4)) for number in range(count)]
        rows: list[dict[str, Any]] = [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}
            for asked, answer in said
        ]
        write_rows(folder / f"{name}.jsonl", [row | {"level": number % 3} for number, row in enumerate(rows)])
    labels = [[True, False, True], [False, True], [True, False]] * 4
    steps = [{"prompt": "task", "completions": [f"step {label}" for label in row], "labels": row} for row in labels]
    write_rows(folder / "steps.jsonl", steps)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if recipe.in_every_run else IN_LONG_RUNS) for name, recipe in RECIPES.items()]
)
def test_a_killed_run_of_a_recipe_ends_as_the_uninterrupted_one(
    request: pytest.FixtureRequest,
    killable_process: Callable[..., KillableProcess],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    recipe = RECIPES[name]
    if "gymnasium" in str(recipe.changes):
        pytest.importorskip("gymnasium")
    config: Config = request.getfixturevalue("rl_config" if recipe.rollouts else "base_config")
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    config["steps"] = 2 + KILLS * (MOST_STEPS + 4)
    changes = dict(recipe.changes)
    if "data.eval" in changes:
        changes["evaluation.every_steps"] = 5
    if not recipe.rollouts and "source" not in changes:
        # What dropout draws goes on where it was, too. Other sources refuse it.
        changes["model.config_overrides.attention_dropout"] = 0.1
    for key, value in changes.items():
        config = merged(config, key, value)
    whole = train(config, name="whole")
    instants = random.Random(name)
    for kill in range(KILLS):
        # Every fourth somewhere in the start: reading, scoring, restoring, cutting the metrics back.
        steps = instants.randint(1, MOST_STEPS) if kill % 4 != 3 else None
        process = killable_process(config)
        process.wait_for_steps(steps, instants.uniform(0, 2.0 if steps is None else 0.1))
        process.kill()
    run = train(config)
    assert_same_run(run, whole)
    assert kept_steps(run) == kept_steps(whole)
    if recipe.rollouts:
        assert kept_attempts(run) == kept_attempts(whole)
        kept = KeptRollouts(run)
        ends = [*{(each.draw, each.step) for each in kept.attempts()}, *((e.draw, e.step) for e in kept.given_up())]
        assert sorted(draw for draw, _ in ends) == [*range(len(ends))], "a draw ended never, or twice"
    answers = [Path(each.run_dir, "eval_samples.jsonl") for each in (run, whole)]
    assert len({path.exists() and path.read_text() for path in answers}) == 1
    assert all(any(line.get(metric, 0) > 0 for line in run.lines) for metric in recipe.rises)
