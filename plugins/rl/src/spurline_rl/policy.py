"""Give each attempt of an environment a policy, which asks the engine and remembers every turn.

Data flow: environment -> token ids -> EnginePolicy -> request with seed and name -> rollout engine -> Turn.
Seeds depend only on run, prompt, sample, turn and retry. So a resumed run samples the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from spurline.errors import DataError, PluginError
from spurline_rl.protocols.environment import AttemptFailedError, Task
from spurline_rl.protocols.rollout_engine import GenerationRequest, GenerationResult, RolloutEngine, Sampling
from spurline_rl.trajectory import Trajectory, Turn


def derive_seed(run_seed: int, uid: str, sample: int, turn: int, attempt: int = 0) -> int:
    """Return a seed in [0, 2**63) for one model call.

    Args:
        uid: Name of one use of a prompt. It differs from epoch to epoch.
        sample: Number of the attempt in its group.
        attempt: Number of failed attempts before this one. It gives a retry other seeds.
    """
    name = f"{run_seed}\0{uid}\0{sample}\0{turn}\0{attempt}"
    return xxhash.xxh3_64_intdigest(name.encode()) >> 1


_DISTRIBUTION = ("temperature", "top_p", "top_k")
"""Fields of `Sampling` that change the distribution of tokens."""


@dataclass(eq=False)
class EnginePolicy:
    """A PolicyHandle that generates with a rollout engine.

    Attributes:
        sampling: Sampling settings of a turn, unless the environment passes others to `generate`.
        attempt: Number of failed attempts at this task.
        any_distribution: Whether turns may use a different temperature, top_p or top_k from `sampling`. Such turns are
            not trained on, because the trainer computes all logprobs with the settings of the run.
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
        return tuple(self._finished[number] for number in sorted(self._finished))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> GenerationResult:
        """Generate a turn. Raises PluginError for settings that cannot be trained on. Errors of the engine pass."""
        if sampling is not None and not self.any_distribution:
            self._check_distribution(sampling)
            sampling = replace(sampling, support_width=self.sampling.support_width)
        # A turn gets its number before the engine is awaited, so numbers do not depend on which turn ends first.
        number = self._num_asked
        self._num_asked += 1
        task = self.task
        if len(prompt_ids) == 0:
            raise DataError(
                f"{task.location}: the prompt has no tokens. Give the row a prompt, or use a tokenizer that begins "
                "texts with a token."
            )
        retry = f" attempt {self.attempt}" if self.attempt else ""
        request = GenerationRequest(
            prompt_ids=list(prompt_ids),
            sampling=sampling or self.sampling,
            seed=derive_seed(self.run_seed, task.uid, task.sample, number, self.attempt),
            name=f"{task.uid} sample {task.sample} turn {number}{retry}",
        )
        result = await self.engine.generate(request)
        length, support = len(result.token_ids), result.support
        limit = request.sampling.max_new_tokens
        own_limit = result.finish_reason == "length" and length == limit < self.sampling.max_new_tokens
        assert len(result.logprobs) == len(result.versions) == length, (
            f"the arrays of the engine's answer to {request.name} differ in length"
        )
        self._finished[number] = Turn(
            prompt_ids=np.array(request.prompt_ids, np.int32),
            response_ids=result.token_ids,
            # Without its support, a token's logprob cannot be computed.
            loss_mask=np.ones(length, np.uint8) if support is None else (support[:, 0] >= 0).astype(np.uint8),
            logprobs=result.logprobs,
            versions=result.versions,
            support=support,
            routed_experts=result.routed_experts,
            # Who asks for a shorter response gets a whole one: it is not cut off.
            finish_reason="stop" if own_limit else result.finish_reason,
            engines=result.engines,
        )
        return result

    def _check_distribution(self, sampling: Sampling) -> None:
        others = [name for name in _DISTRIBUTION if getattr(sampling, name) != getattr(self.sampling, name)]
        if others:
            asked = ", ".join(f"{name} {getattr(sampling, name):g}" for name in others)
            own = ", ".join(f"{name} {getattr(self.sampling, name):g}" for name in others)
            raise PluginError(
                f"{self.task.location}: the environment samples a turn with {asked}, but the run trains with {own}, "
                "so importance ratios would be wrong. Change other fields only, as in dataclasses.replace("
                "policy.sampling, max_new_tokens=...), or set source.sampling."
            )

    def finish(
        self,
        rewards: Mapping[str, float] | None = None,
        *,
        turn_rewards: Sequence[float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """Return the trajectory. Raises ValueError unless `turn_rewards` has one reward for each turn."""
        turns = self.turns
        if turn_rewards is not None:
            if len(turn_rewards) != len(turns):
                raise ValueError(f"{len(turn_rewards)} turn rewards for {len(turns)} turns; give one for each")
            turns = tuple(map(_reward_turn, turns, turn_rewards))
        return Trajectory(self.task.uid, self.task.sample, turns, dict(rewards or {}), dict(info or {}))


def _reward_turn(turn: Turn, reward: float) -> Turn:
    if not len(turn.response_ids) and reward:
        raise AttemptFailedError(f"A turn without response tokens cannot have a reward, but it got {reward:g}.")
    values = np.zeros(len(turn.response_ids), dtype=np.float32)
    values[-1:] = reward
    return replace(turn, rewards=values)
