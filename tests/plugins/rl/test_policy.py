"""The handle that an environment talks to: seeds, names, and the turns it remembers."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from rl_attempts import make_policy, make_task, run

from spurline.errors import DataError
from spurline_rl.metrics import support_metrics
from spurline_rl.policy import derive_seed
from spurline_rl.protocols.environment import AttemptFailedError
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling
from spurline_rl.testing.environment_contract import ScriptedEngine
from spurline_rl.trajectory import Group


def countdown(request: GenerationRequest) -> list[int]:
    return list(range(len(request.prompt_ids), 0, -1))


def test_requests_carry_name_and_seed_of_task_turn_and_attempt():
    engine = ScriptedEngine(countdown)

    async def two_turns(attempt: int) -> None:
        policy = make_policy(engine, make_task(sample=3), attempt)
        await policy.generate([1])
        await policy.generate([1, 2])

    run(two_turns(0))
    run(two_turns(2))
    assert [request.name for request in engine.requests] == [
        "train:0@0 sample 3 turn 0",
        "train:0@0 sample 3 turn 1",
        "train:0@0 sample 3 turn 0 attempt 2",
        "train:0@0 sample 3 turn 1 attempt 2",
    ]
    expected = [derive_seed(0, "train:0@0", 3, turn, attempt) for attempt in (0, 2) for turn in (0, 1)]
    assert [request.seed for request in engine.requests] == expected
    assert len(set(expected)) == 4


def test_settings_that_an_environment_makes_itself_keep_the_support_that_training_needs():
    engine = ScriptedEngine(countdown)
    policy = make_policy(engine, top_k=5, support_width=21)
    run(policy.generate([1], Sampling(top_k=5, max_new_tokens=2)))
    assert engine.requests[0].sampling == Sampling(top_k=5, max_new_tokens=2, support_width=21)


def test_a_token_of_unknown_support_has_no_loss_and_is_counted():
    class Engine(ScriptedEngine):
        async def generate(self, request: GenerationRequest) -> GenerationResult:
            support = np.array([[3, 1], [-1, -1], [2, -1], [1, 4]], np.int32)
            return replace(await super().generate(request), support=support)

    policy = make_policy(Engine(countdown))
    run(policy.generate([1, 2, 3, 4]))
    assert policy.turns[0].loss_mask.tolist() == [1, 0, 1, 1]
    assert support_metrics([Group("a", 0, (policy.finish({}),))]) == {"rollout/unknown_support": 0.25}


def test_a_response_that_an_agent_keeps_short_is_whole_and_one_that_fills_the_context_is_cut_off():
    policy = make_policy(ScriptedEngine(lambda request: [7] * 9, context=6), max_new_tokens=3)
    for prompt, limit in (([1], 2), ([1], 3), ([1] * 5, 2)):
        result = run(policy.generate(prompt, replace(policy.sampling, max_new_tokens=limit)))
        assert result.finish_reason == "length"
    assert [turn.finish_reason for turn in policy.turns] == ["stop", "length", "length"]


def test_turns_hold_exactly_what_was_asked_and_written():
    policy, prompt = make_policy(ScriptedEngine(countdown)), [5, 6, 7]
    result = run(policy.generate(prompt))
    prompt.append(8)
    [turn] = policy.turns
    assert turn.prompt_ids.tolist() == [5, 6, 7]
    assert turn.response_ids.tolist() == [3, 2, 1] == result.token_ids.tolist()
    assert turn.loss_mask.tolist() == [1, 1, 1]
    assert turn.finish_reason == "stop"
    np.testing.assert_array_equal(turn.logprobs, result.logprobs)
    np.testing.assert_array_equal(turn.versions, result.versions)


def test_turns_asked_for_together_keep_their_order_whoever_ends_first():
    policy = make_policy(ScriptedEngine(countdown))
    prompts = [[7] * length for length in range(1, 9)]

    async def together() -> None:
        await asyncio.gather(*(policy.generate(prompt) for prompt in prompts))

    run(together())
    assert [turn.prompt_ids.tolist() for turn in policy.turns] == prompts


def test_an_empty_prompt_is_an_error_with_the_rows_place():
    with pytest.raises(DataError, match=r"^rows\.jsonl:1: the prompt has no tokens"):
        run(make_policy(ScriptedEngine(countdown)).generate([]))


def test_finish_puts_turn_rewards_on_last_tokens():
    policy = make_policy(ScriptedEngine(countdown), make_task(sample=2))

    async def two_turns() -> None:
        await policy.generate([1])
        await policy.generate([1, 2])

    run(two_turns())
    trajectory = policy.finish({"right": 1.0}, turn_rewards=[0.5, -1.0], info={"note": "x"})
    assert (trajectory.uid, trajectory.sample) == ("train:0@0", 2)
    assert trajectory.rewards == {"right": 1.0}
    assert trajectory.info == {"note": "x"}
    rewards = [turn.rewards.tolist() for turn in trajectory.turns if turn.rewards is not None]
    assert rewards == [[0.5], [0.0, -1.0]]


def test_finish_refuses_rewards_that_do_not_fit_the_turns():
    policy = make_policy(ScriptedEngine(countdown))
    run(policy.generate([1]))
    with pytest.raises(ValueError, match="2 turn rewards for 1 turns"):
        policy.finish(turn_rewards=[1.0, 2.0])


def test_a_reward_for_a_turn_without_tokens_is_refused():
    policy = make_policy(ScriptedEngine(lambda request: []))
    run(policy.generate([1]))
    assert policy.finish(turn_rewards=[0.0]).turns[0].rewards is not None
    with pytest.raises(AttemptFailedError, match="cannot have a reward, but it got 2"):
        policy.finish(turn_rewards=[2.0])
