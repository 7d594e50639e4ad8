"""Check that an environment keeps its contract. A scripted engine replaces the model."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from spurline.errors import DataError, RunFailedError
from spurline.protocols.dataset import DatasetConfig
from spurline_rl.policy import EnginePolicy
from spurline_rl.protocols.environment import Environment, ShowsPrompt, Task
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, Sampling
from spurline_rl.scoring import score
from spurline_rl.trajectory import Trajectory
from spurline_text.testing.inputs import tiny_tokenizer

Script = Callable[[GenerationRequest], Sequence[int]]


class ScriptedEngine:
    """An engine that answers each request with the tokens from `script`, cut to the request's limit.

    Attributes:
        requests: All requests, in order.
        exchanges: The prompt and the response of each finished request.
    """

    def __init__(self, script: Script, *, context: int = 4096) -> None:
        self._script = script
        self._context = context
        self.requests: list[GenerationRequest] = []
        self.exchanges: list[tuple[list[int], list[int]]] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        room = min(request.sampling.max_new_tokens, self._context - len(request.prompt_ids))
        if room < 1:
            raise DataError(f"{request.name}: no room for a response: the prompt has {len(request.prompt_ids)} tokens.")
        # Some requests wait longer than others, so attempts do not end in order.
        for _ in range(request.seed % 5):
            await asyncio.sleep(0)
        answer = list(self._script(request))
        self.exchanges.append((list(request.prompt_ids), answer[:room]))
        tokens = np.asarray(answer[:room], dtype=np.int32)
        logprobs = -np.random.default_rng(request.seed).random(len(tokens)).astype(np.float32)
        return GenerationResult(
            token_ids=tokens,
            logprobs=logprobs,
            versions=np.zeros(len(tokens), dtype=np.int32),
            finish_reason="length" if len(answer) > room else "stop",
        )

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def close(self) -> None: ...


def random_text(vocabulary: Sequence[int], end_token: int, longest: int = 20) -> Script:
    """Return a script that returns random tokens and then the end token. The request's seed determines the tokens."""

    def script(request: GenerationRequest) -> list[int]:
        random = np.random.default_rng(request.seed)
        return [int(token) for token in random.choice(vocabulary, random.integers(0, longest))] + [end_token]

    return script


_TIME_LIMIT_S = 60.0


class EnvironmentContract:
    """A test suite: define `make_environment(tokenizer)` in a subclass, and `row()` if your rows are not chats."""

    def make_environment(self, tokenizer: PreTrainedTokenizerBase) -> Environment:
        raise NotImplementedError("subclass EnvironmentContract with make_environment(self, tokenizer)")

    def row(self) -> Mapping[str, Any]:
        """Return a dataset row that the environment understands."""
        return {"messages": [{"role": "user", "content": "Sort: 3 1 2"}, {"role": "assistant", "content": "1 2 3"}]}

    def test_a_trajectory_belongs_to_its_task_and_keeps_what_the_engine_wrote(self) -> None:
        engine = _random_engine()
        [trajectory] = self._run(engine, [0])
        assert (trajectory.uid, trajectory.sample) == ("rows:0@0", 0)
        assert trajectory.turns
        for turn in trajectory.turns:
            exchange = turn.prompt_ids.tolist(), turn.response_ids.tolist()
            assert exchange in engine.exchanges, "a turn differs from the engine's prompt and response"
            for name in ("loss_mask", "logprobs", "versions", "rewards"):
                values = getattr(turn, name)
                assert values is None or len(values) == len(turn.response_ids), name

    def test_the_first_prompt_it_announces_is_the_one_it_sends(self) -> None:
        environment = self.make_environment(tiny_tokenizer())
        announced = environment.first_prompt(self._task(0)) if isinstance(environment, ShowsPrompt) else None
        if announced is None:
            pytest.skip("it does not announce its first prompt")
        [trajectory] = self._run(_random_engine(), [0])
        assert trajectory.turns[0].prompt_ids.tolist() == list(announced)

    def test_every_attempt_gives_the_same_reward_terms_with_finite_numbers_and_info_in_json(self) -> None:
        trajectories = self._run(_random_engine(), range(8))
        assert len({frozenset(trajectory.rewards) for trajectory in trajectories}) == 1, "reward terms differ"
        for trajectory in trajectories:
            assert trajectory.rewards or any(turn.rewards is not None for turn in trajectory.turns)
            scored = score(trajectory, {})
            assert all(turn.rewards is not None and np.isfinite(turn.rewards).all() for turn in scored.turns)
            json.dumps(trajectory.info)

    def test_attempts_at_the_same_time_do_not_touch_each_other(self) -> None:
        together = self._run(_random_engine(), range(8))
        alone = [self._run(_random_engine(), [sample])[0] for sample in range(8)]
        for one, other in zip(together, alone, strict=True):
            assert _content(one) == _content(other)

    def test_an_error_of_the_engine_is_not_swallowed(self) -> None:
        def die(request: GenerationRequest) -> Sequence[int]:
            raise RunFailedError("the engine died")

        with pytest.raises(RunFailedError, match="the engine died"):
            self._run(ScriptedEngine(die), [0])

    def test_a_cancelled_attempt_ends(self) -> None:
        class Silent(ScriptedEngine):
            async def generate(self, request: GenerationRequest) -> GenerationResult:
                waiting.set()
                await asyncio.sleep(3600)
                raise AssertionError("unreachable")

        waiting = asyncio.Event()

        async def cancel() -> None:
            environment = self.make_environment(tiny_tokenizer())
            attempt = asyncio.ensure_future(_attempt(environment, Silent(lambda request: [1]), self._task(0)))
            await asyncio.wait_for(waiting.wait(), _TIME_LIMIT_S)
            attempt.cancel()
            done, _ = await asyncio.wait([attempt], timeout=_TIME_LIMIT_S)
            assert done, "the attempt goes on after it was cancelled"
            assert attempt.cancelled()
            await _close(environment)

        asyncio.run(cancel())

    def _task(self, sample: int) -> Task:
        return Task(self.row(), DatasetConfig(name="rows"), "rows:0@0", sample, "rows.jsonl:1")

    def _run(self, engine: ScriptedEngine, samples: Iterable[int]) -> list[Trajectory]:
        async def run() -> list[Trajectory]:
            environment = self.make_environment(tiny_tokenizer())
            try:
                attempts = [_attempt(environment, engine, self._task(sample)) for sample in samples]
                return list(await asyncio.wait_for(asyncio.gather(*attempts), _TIME_LIMIT_S))
            finally:
                await _close(environment)

        return asyncio.run(run())


async def _attempt(environment: Environment, engine: ScriptedEngine, task: Task) -> Trajectory:
    policy = EnginePolicy(engine, replace(Sampling(), max_new_tokens=32), run_seed=0, task=task)
    return await environment.run(task, policy)


def _random_engine() -> ScriptedEngine:
    """Return an engine that writes random hexadecimal digits."""
    tokenizer = tiny_tokenizer()
    assert isinstance(tokenizer.eos_token_id, int)
    digits = tokenizer.encode("0123456789abcdef", add_special_tokens=False)
    return ScriptedEngine(random_text(digits, tokenizer.eos_token_id))


def _content(trajectory: Trajectory) -> list[Any]:
    turns = [(turn.prompt_ids.tolist(), turn.response_ids.tolist()) for turn in trajectory.turns]
    return [trajectory.sample, turns, dict(trajectory.rewards)]


async def _close(environment: Any) -> None:
    if hasattr(environment, "close"):
        closing = environment.close()
        if inspect.isawaitable(closing):
            await closing
