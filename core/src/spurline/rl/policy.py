"""The policy as an environment sees it: one handle per attempt that asks the engine and remembers every turn.

Place on the way: environment -> token ids -> EnginePolicy -> request with seed and name -> rollout engine -> Turn.
Seeds are a pure function of who asks, so that a resumed run samples what the first would have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from spurline.errors import DataError, PluginError
from spurline.protocols.environment import AttemptFailedError, Task
from spurline.protocols.rollout_engine import GenerationRequest, GenerationResult, RolloutEngine, Sampling
from spurline.rl.trajectory import Trajectory, Turn


def derive_seed(run_seed: int, uid: str, sample: int, turn: int, attempt: int = 0) -> int:
    """A seed in [0, 2**63) for one model call.

    uid: names the draw of the prompt, and with it the epoch. attempt: counts retries of a failed attempt, so that a
    retry does not repeat what failed.
    """
    name = "\0".join(map(str, (run_seed, uid, sample, turn, attempt)))
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1


_DISTRIBUTION = ("temperature", "top_p", "top_k")
"""Parts of a sampling that say which distribution tokens are drawn from, not when a response ends."""


@dataclass(eq=False)
class EnginePolicy:
    """A PolicyHandle on a rollout engine.

    sampling: of turns that the environment samples in no way of its own. attempt: how often this task has failed
    before; part of every seed. any_distribution: turns may be sampled with another temperature, top_p or top_k than
    `sampling` has, which must not be where they are trained on: the trainer computes all logprobs for those of the run.
    """

    engine: RolloutEngine
    sampling: Sampling
    task: Task
    attempt: int = 0
    _: KW_ONLY
    run_seed: int
    any_distribution: bool = False
    _num_asked: int = field(default=0, init=False)
    _finished: dict[int, Turn] = field(default_factory=dict[int, Turn], init=False)

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(turn for _, turn in sorted(self._finished.items()))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> GenerationResult:
        """As of PolicyHandle. Raises PluginError for a sampling that cannot be trained on, and what the engine does."""
        if sampling is not None and not self.any_distribution:
            self._check_distribution(sampling)
        # Counted before waiting: turns that an environment asks for together keep their numbers, whoever ends first.
        number = self._num_asked
        self._num_asked += 1
        task = self.task
        if len(prompt_ids) == 0:
            raise DataError(
                f"{task.location}: the prompt has no tokens, so there is nothing to go on from. Give the row a prompt, "
                "or use a tokenizer that begins texts with a token."
            )
        retry = f" attempt {self.attempt}" if self.attempt else ""
        request = GenerationRequest(
            prompt_ids=list(prompt_ids),
            sampling=sampling or self.sampling,
            seed=derive_seed(self.run_seed, task.uid, task.sample, number, self.attempt),
            name=f"{task.uid} sample {task.sample} turn {number}{retry}",
        )
        result = await self.engine.generate(request)
        self._finished[number] = _make_turn(request, result)
        return result

    def _check_distribution(self, sampling: Sampling) -> None:
        others = [name for name in _DISTRIBUTION if getattr(sampling, name) != getattr(self.sampling, name)]
        if others:
            asked = ", ".join(f"{name} {getattr(sampling, name):g}" for name in others)
            own = ", ".join(f"{name} {getattr(self.sampling, name):g}" for name in others)
            raise PluginError(
                f"{self.task.location}: the environment samples a turn with {asked}, but the run trains with {own}, "
                "so importance ratios would be wrong. Change only what it must with dataclasses.replace("
                "policy.sampling, max_new_tokens=...), set source.sampling, or accept the bias with "
                "source.sampling.allow_truncated: true."
            )

    def finish(
        self,
        rewards: Mapping[str, float] | None = None,
        *,
        turn_rewards: Sequence[float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """As of PolicyHandle. Raises ValueError when there is not one reward for each turn."""
        turns = self.turns
        if turn_rewards is not None:
            if len(turn_rewards) != len(turns):
                raise ValueError(f"{len(turn_rewards)} turn rewards for {len(turns)} turns; give one for each")
            turns = tuple(_reward_turn(turn, reward) for turn, reward in zip(turns, turn_rewards, strict=True))
        return Trajectory(self.task.uid, self.task.sample, turns, dict(rewards or {}), dict(info or {}))


def _make_turn(request: GenerationRequest, result: GenerationResult) -> Turn:
    length = len(result.token_ids)
    assert len(result.logprobs) == len(result.versions) == length, f"the engine's answer to {request.name} is ragged"
    return Turn(
        prompt_ids=np.asarray(request.prompt_ids, dtype=np.int32),
        response_ids=result.token_ids,
        loss_mask=np.ones(length, dtype=np.uint8),
        logprobs=result.logprobs,
        versions=result.versions,
        routed_experts=result.routed_experts,
        finish_reason=result.finish_reason,
    )


def _reward_turn(turn: Turn, reward: float) -> Turn:
    if not len(turn.response_ids) and reward:
        raise AttemptFailedError(f"A turn without response tokens has no place for its reward of {reward:g}.")
    values = np.zeros(len(turn.response_ids), dtype=np.float32)
    values[-1:] = reward
    return replace(turn, rewards=values)
