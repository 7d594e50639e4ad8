"""How attempts are sampled and scored in training and in held-out evaluation, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from rl_attempts import run
from scripted_groups import Behaviour, Prompt, Scripted, answer, one_token

from spurline.errors import ConfigError, PluginError
from spurline_rl.advantages.configs import GrpoConfig
from spurline_rl.attempts import Attempts
from spurline_rl.configs import CutOffConfig, OverlongConfig, RolloutSourceConfig, SamplingConfig
from spurline_rl.evaluation_configs import HeldOutConfig
from spurline_rl.protocols.environment import EnvironmentConfig, PolicyHandle, Task
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig, Sampling
from spurline_rl.testing.environment_contract import Script, ScriptedEngine
from spurline_rl.trajectory import Group, Trajectory

PROMPTS: Any = [Prompt(0), Prompt(1)]


def make_attempts(
    behaviour: Behaviour = answer, script: Script = one_token, *, held_out_data: Sequence[str] = (), **source: Any
) -> tuple[Attempts, ScriptedEngine]:
    engine = ScriptedEngine(script)
    made = {"rollout_engine": engine, "environment": Scripted(behaviour)}
    registry = SimpleNamespace(create=lambda kind, config, **dependencies: made[kind])
    context: Any = SimpleNamespace(
        config=SimpleNamespace(seed=0, data=SimpleNamespace(eval=held_out_data)),
        host=SimpleNamespace(registry=registry),
        tokenizer=None,
    )
    parts = {"environment": EnvironmentConfig(name="any"), "engine": RolloutEngineConfig(name="any")}
    settings = {"prompts_per_step": 2, "samples_per_prompt": 2, "advantage": GrpoConfig(), **source}
    return Attempts(RolloutSourceConfig(**parts, **settings), context, lambda engine: None), engine


def with_sampling(**changes: Any) -> Behaviour:
    async def behaviour(task: Task, policy: PolicyHandle) -> Trajectory:
        await policy.generate([1, 2], replace(policy.sampling, **changes))
        return policy.finish({"length": 1.0})

    return behaviour


async def gives_overlong(task: Task, policy: PolicyHandle) -> Trajectory:
    await policy.generate([1, 2])
    return policy.finish({"overlong": 0.5})


def returns_of(outcomes: Sequence[Any]) -> list[float]:
    assert all(isinstance(outcome, Group) for outcome in outcomes), outcomes
    return [value for outcome in outcomes for value in outcome.returns.tolist()]


def test_held_out_requests_carry_the_held_out_temperature_and_keep_all_tokens() -> None:
    attempts, engine = make_attempts(
        sampling=SamplingConfig(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=9, stop=("x",))
    )
    run(attempts.evaluate(PROMPTS, HeldOutConfig(temperature=0.3, samples_per_prompt=3)))
    assert [request.sampling for request in engine.requests] == 6 * [
        Sampling(temperature=0.3, max_new_tokens=9, stop=("x",))
    ]
    engine.requests.clear()
    run(attempts.training.run_groups(PROMPTS))
    assert [request.sampling for request in engine.requests] == 4 * [
        Sampling(temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=9, stop=("x",), support_width=21)
    ]


async def cuts_every_second(task: Task, policy: PolicyHandle) -> Trajectory:
    # The first sample asks for fewer tokens than the run allows.
    limit = policy.sampling.max_new_tokens - (task.sample == 0)
    assert (await policy.generate([1, 2], replace(policy.sampling, max_new_tokens=limit))).finish_reason == "length"
    return policy.finish({"right": 1.0})


@pytest.mark.parametrize(
    ("cut_off", "returns", "trained", "counted"),
    [
        ("keep", [1.0, 1.0], [1, 2], [True, True]),
        ("mask", [1.0, 1.0], [1, 0], [True, True]),
        ({"action": "mask", "in_baseline": False}, [1.0, 1.0], [1, 0], [True, False]),
        ("penalise", [1.0, 0.0], [1, 2], [True, True]),
        ({"action": "penalise", "penalty": 0.25}, [1.0, 0.75], [1, 2], [True, True]),
    ],
)
def test_what_becomes_of_attempts_that_were_cut_off(
    cut_off: Any, returns: list[float], trained: list[int], counted: list[bool]
) -> None:
    sampling = SamplingConfig(max_new_tokens=2)
    attempts, _ = make_attempts(cuts_every_second, lambda request: [5, 6, 7], cut_off=cut_off, sampling=sampling)
    outcomes: Any = run(attempts.training.run_groups(PROMPTS))
    for group in outcomes:
        assert group.returns.tolist() == returns
        assert [int(turn.loss_mask.sum()) for each in group.trajectories for turn in each.turns] == trained
        assert [each.counts for each in group.trajectories] == counted
    for group in run(attempts.evaluate(PROMPTS, HeldOutConfig(samples_per_prompt=2))):
        assert group.returns.tolist() == [1.0, 1.0]
        assert all(turn.loss_mask.all() and each.counts for each in group.trajectories for turn in each.turns)


@pytest.mark.parametrize("settings", [{"action": "penalise", "in_baseline": False}, {"action": "mask", "penalty": 2.0}])
def test_settings_of_another_action_are_refused(settings: dict[str, Any]) -> None:
    [problem] = CutOffConfig(**settings).problems(None)  # type: ignore[arg-type]
    assert "Remove it" in str(problem)


async def gives_two_terms(task: Task, policy: PolicyHandle) -> Trajectory:
    await policy.generate([1, 2])
    return policy.finish({"right": 1.0, "short": -0.1})


def test_training_notices_at_once_that_nothing_says_what_a_held_out_success_is() -> None:
    attempts, _ = make_attempts(gives_two_terms, held_out_data=["rows.jsonl"])
    with pytest.raises(ConfigError, match=r"source\.held_out\.success does not say which reward .* right, short"):
        run(attempts.training.run_groups(PROMPTS))


CHANGES = [{"temperature": 0.5}, {"top_p": 0.9}, {"top_k": 20}]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_turn_of_another_distribution_cannot_be_trained_on(changes: dict[str, Any]) -> None:
    attempts, engine = make_attempts(with_sampling(**changes))
    [(name, value)] = changes.items()
    with pytest.raises(PluginError, match=rf"jsonl:1: the environment samples a turn with {name} {value}, but the run"):
        run(attempts.training.run_groups(PROMPTS))
    assert engine.requests == []


@pytest.mark.parametrize("changes", CHANGES)
def test_a_turn_of_another_distribution_may_be_evaluated(changes: dict[str, Any]) -> None:
    attempts, engine = make_attempts(with_sampling(**changes))
    assert returns_of(run(attempts.evaluate(PROMPTS, HeldOutConfig()))) == [1.0, 1.0]
    [(name, value)] = changes.items()
    assert {getattr(request.sampling, name) for request in engine.requests} == {value}


def test_the_end_of_a_turn_may_be_changed_in_training() -> None:
    changes = {"max_new_tokens": 3, "stop": ("y",), "stop_token_ids": (4,)}
    attempts, engine = make_attempts(with_sampling(**changes), sampling=SamplingConfig(temperature=0.7))
    assert returns_of(run(attempts.training.run_groups(PROMPTS))) == 4 * [1.0]
    assert {request.sampling for request in engine.requests} == {Sampling(temperature=0.7, **changes)}


def test_a_term_named_overlong_cannot_stand_beside_the_one_of_the_source() -> None:
    attempts, _ = make_attempts(gives_overlong, overlong=OverlongConfig(buffer_tokens=4))
    evaluate = partial(attempts.evaluate, held_out=HeldOutConfig())
    for attempt in (attempts.training.run_groups, evaluate):
        with pytest.raises(ConfigError, match=r"source\.overlong adds a reward term 'overlong', but the environment"):
            run(attempt(PROMPTS))


def test_the_penalty_on_length_counts_in_training_with_its_weight_and_never_in_evaluation() -> None:
    attempts, _ = make_attempts(
        overlong=OverlongConfig(buffer_tokens=1, penalty=0.5),
        reward_weights={"overlong": 3.0},
        sampling=SamplingConfig(max_new_tokens=1),
    )
    assert returns_of(run(attempts.training.run_groups(PROMPTS))) == 4 * [1.0 - 3.0]
    assert returns_of(run(attempts.evaluate(PROMPTS, HeldOutConfig()))) == 2 * [1.0]
