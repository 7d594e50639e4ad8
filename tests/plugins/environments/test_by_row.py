"""Several environments in one run: how attempts reach theirs, its limits, and advantages of each environment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from rl_attempts import core_registry, make_policy, make_task, run, says
from scripted_groups import Prompt, make_runner

from spurline.config.assembly import assemble
from spurline.config.run_config import DataConfig, DatasetConfig
from spurline.errors import DataError, PluginError
from spurline.protocols.collator import ParallelLayout
from spurline_environments.by_environment import ByEnvironment
from spurline_environments.by_row import ByRow
from spurline_environments.configs import ByEnvironmentConfig, ByRowConfig
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.group_runner import GivenUpPrompt, GivenUpPrompts
from spurline_rl.preparation import Preparation
from spurline_rl.protocols.environment import Environment, EnvironmentConfig, Task
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.scoring import score
from spurline_rl.testing.environment_contract import EnvironmentContract, ScriptedEngine
from spurline_rl.testing.inputs import make_trajectories
from spurline_rl.trajectory import Group
from spurline_text.testing.inputs import tiny_tokenizer

MATH = {"name": "single_turn", "rewards": "exact_match"}
ROW = {
    "messages": [{"role": "user", "content": "6 * 7"}, {"role": "assistant", "content": "42"}],
    "of": {"kind": "math"},
}


def config_of(section: type[Any], **settings: Any) -> Any:
    part: Any = assemble(core_registry(), {"part": section}).model_fields["part"].annotation
    return part.model_validate(settings)


def make_environment(tokenizer: Any, **settings: Any) -> ByRow:
    parts = {"math": MATH, "open": "fated:Twice"}
    config = config_of(ByRowConfig, column="of.kind", environments=parts, **settings)
    data = DataConfig(train=(DatasetConfig(name="rows"),), on_ignored="warn")
    return ByRow(config, core_registry(), tokenizer, data)


class TestByRow(EnvironmentContract):
    def make_environment(self, tokenizer: Any) -> Environment:
        return make_environment(tokenizer)

    def row(self) -> Mapping[str, Any]:
        return ROW


def test_an_attempt_runs_in_the_environment_of_its_row_within_the_limits_of_that_environment() -> None:
    tokenizer = tiny_tokenizer()
    environment = make_environment(tokenizer, limits={"open": {"max_new_tokens": 3, "attempt_timeout_s": 5}})
    found: dict[str, Any] = {}
    for label in ("math", "open"):
        engine = ScriptedEngine(says(tokenizer, "4242", "4242"))
        task = make_task({**ROW, "of": {"kind": label}, "fate": "trained"})
        found[label] = run(environment.run(task, make_policy(engine, task, max_new_tokens=20)))
        assert {request.sampling.max_new_tokens for request in engine.requests} == {3 if label == "open" else 20}
        assert (environment.first_prompt(task) is None) == (label == "open"), "a custom environment shows no prompt"
    assert [*found["math"].rewards, *found["open"].rewards] == ["exact_match", "both"]
    assert [len(found["open"].turns), found["open"].info["metrics"]] == [2, {"twice": 2.0}]
    assert environment.time_limit_of("open") == (5, "source.environment.limits.open.attempt_timeout_s")
    assert environment.time_limit_of("math") is None
    limits = {"math": {"max_new_tokens": 5}, "open": {"max_new_tokens": 3}}
    parts = {"math": MATH, "open": {"name": "custom", "path": "fated:Twice", "max_turns": 2}}
    config = config_of(ByRowConfig, environments=parts, limits=limits)
    assert [config.turn_tokens(label, 20) for label in parts] == [5, 3]
    assert [config.most_tokens(20), config.most_turns, config.reward_terms] == [6, 2, None]
    source = SimpleNamespace(facts=SimpleNamespace(sampling=None))
    [taken] = config.problems(SimpleNamespace(source=source, evaluations={"env": None}))
    assert "as those of evaluations.env. Rename it" in str(taken)
    for kind, said in ((None, r"missing or null.* The row has: messages, of, of\.kind"), ("opne", "mean 'open'")):
        with pytest.raises(DataError, match=rf"'of\.kind'.*{said}"):
            environment.label_of(make_task({**ROW, "of": {"kind": kind}}))


def test_an_environment_that_returns_no_trajectory_is_named() -> None:
    async def nothing(task: Any, policy: Any) -> None: ...

    runner = make_runner()
    runner.environment = environment = make_environment(tiny_tokenizer())
    environment._parts["open"] = SimpleNamespace(run=nothing)  # type: ignore[assignment]
    said = (
        r"ByRow 'open'\.run returned a NoneType, not a Trajectory, for sample 0 .*Return the result of `policy.finish`"
    )
    with pytest.raises(PluginError, match=said):
        run(runner.run_group(Prompt(0, {"of": {"kind": "open"}})))


def test_an_environment_that_cannot_be_made_leaves_no_other_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    async def close(self: Any) -> None:
        closed.append(type(self).__name__)

    monkeypatch.setattr("fated.Twice.close", close, raising=False)
    parts = {"open": "fated:Twice", "broken": {**MATH, "name": "tools", "tools": {"missing": "fated:missing"}}}
    with pytest.raises(PluginError, match="fated has no"):
        ByRow(
            config_of(ByRowConfig, environments=parts), core_registry(), tiny_tokenizer(), DataConfig.model_construct()
        )
    assert closed == ["Twice"]


def test_an_environment_that_hangs_costs_its_attempts_after_its_own_limit_and_keeps_its_label() -> None:
    class Chooses:
        def label_of(self, task: Task) -> str:
            if "of" not in task.row:
                raise DataError(f"{task.location}: no label")
            return task.row["of"]

        def time_limit_of(self, label: str) -> tuple[float, str] | None:
            return (0.2, "limits.hangs") if label == "hangs" else None

        async def run(self, task: Any, policy: Any) -> Any:
            await asyncio.sleep(3600 if task.row["of"] == "hangs" else 0.4)
            await policy.generate([1])
            return policy.finish({"right": 1.0})

    lost = GivenUpPrompts(5)
    runner = make_runner(given_up=lost, retries=1)
    runner.environment = Chooses()
    # An attempt with a long limit began first.
    slow, hung = run(runner.run_groups([Prompt(0, {"of": "slow"}), Prompt(1, {"of": "hangs"})]), 30)
    assert isinstance(slow, Group)
    assert [attempt.environment for attempt in slow.trajectories] == ["slow"] * 3
    assert isinstance(hung, GivenUpPrompt)
    assert hung.environment == "hangs"
    assert "did not end within 0.2 s (limits.hangs)" in hung.reason
    again = GivenUpPrompts(5)
    again.load_state_dict(lost.state_dict())
    assert again.prompts == lost.prompts == (hung,)
    with pytest.raises(DataError, match=r"rows\.jsonl:3: no label"):
        run(runner.run_groups([Prompt(2)]))


def test_advantages_of_an_environment_are_those_of_its_groups_alone() -> None:
    random = np.random.default_rng(0)
    shapes = [[(2, 3 + number % 4)] * (1 + number % 2) for number in range(27)]
    attempts = [
        replace(attempt, uid=f"p{number // 3}", info={"environment": "ba"[number // 3 % 3 == 0]})
        for number, attempt in enumerate(make_trajectories(shapes))
    ]
    groups = [Group(f"p{number}", number, tuple(attempts[3 * number : 3 * number + 3])) for number in range(9)]
    tokens = [int(group.flat.num_response.sum()) for group in groups]
    rewards = random.normal(size=sum(tokens)).astype(np.float32)
    config = config_of(ByEnvironmentConfig, advantages={"a": "reinforce_pp"}, other={"name": "gae", "lam": 0.9})
    registry = core_registry()
    values = random.normal(size=sum(tokens)).astype(np.float32)
    scored = ScoredGroups(groups, {"rewards": rewards, "values": values})
    whole = ByEnvironment(config, registry)
    assert whole.needs == {"values"}
    found = whole.advantages(scored)
    for label, part in (("a", config.advantages["a"]), ("b", config.other)):
        chosen = [group.environment == label for group in groups]
        mask = np.repeat(chosen, tokens)
        alone = ScoredGroups(
            [group for group in groups if group.environment == label],
            {name: column[mask].copy() for name, column in scored.computed.items()},
        )
        for name, expected in registry.create("advantage", part).advantages(alone).items():
            np.testing.assert_array_equal(found[name][mask], expected)


def test_only_attempts_of_an_environment_with_a_model_reward_are_scored_by_the_model() -> None:
    class Judged(EnvironmentConfig):
        name: str = "judged"
        model_rewards: ClassVar[dict[str, str]] = {"quality": "scorer"}  # type: ignore[misc]

    class Parts(Judged):
        by_label: ClassVar[dict[str, Any]] = {"a": Judged(), "b": EnvironmentConfig(name="plain")}

    attempts = [
        score(replace(attempt, uid=f"p{number}", rewards={"quality" if number % 2 else "right": 0.0}), {})
        for number, attempt in enumerate(make_trajectories([[(2, 3)], [(2, 4)], [(3, 3)], [(2, 2), (6, 2)]]))
    ]
    groups = [
        Group(attempt.uid, number, (replace(attempt, info={"environment": "ba"[number % 2]}),))
        for number, attempt in enumerate(attempts)
    ]
    preparation: Any = object.__new__(Preparation)
    preparation._config = SimpleNamespace(
        environment=Parts(), turns="separate", reward_weights={"quality": 2.0}, router_replay=False
    )
    preparation._layout = ParallelLayout()
    preparation._collator = RolloutsCollator(RolloutsCollatorConfig(), pad_token_id=0, layout=preparation._layout)
    asked: list[int] = []

    def logprobs(batch: Any, role: str) -> Any:
        asked.append(batch.num_rows)
        return batch.without_padding_rows().tokens["input_ids"].float()

    plain, judged, other, last = preparation.with_model_rewards(groups, SimpleNamespace(logprobs=logprobs))
    assert asked == [3], "a row for each turn of the attempts with this reward"
    assert (plain, other) == (groups[0], groups[2])
    for group, before in ((judged, groups[1]), (last, groups[3])):
        expected = float(group.trajectories[0].turns[-1].response_ids[-1])
        assert group.trajectories[0].rewards == {"quality": expected}
        assert group.returns[0] - before.returns[0] == pytest.approx(2 * expected, rel=1e-6)
