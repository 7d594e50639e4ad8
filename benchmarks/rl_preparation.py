"""Measure `Preparation.prepare` on a large RL batch with the lengths of `D1`, without forward passes.

The batch has 128 prompts x 8 attempts of 16 to 4,096 tokens (see `collation_inputs.py`). As in `async_rollouts`, each
group was made ready when it was finished. The preparation uses the fast collator, GRPO, truncated importance sampling,
and logprobs that take no time. The 1,024 rows are a multiple of 8 ranks, but not of 6 ranks. `rl_overhead.py` prints
the figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from collation_inputs import DATA_SETS
from timing import Gate, Timing, round_robin
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.plugins.host import PluginHost
from spurline.protocols.collator import ParallelLayout
from spurline_rl.advantages.configs import GrpoConfig
from spurline_rl.configs import RolloutsCollatorConfig, RolloutSourceConfig, SamplingConfig
from spurline_rl.losses.configs import PpoConfig, TruncatedImportanceSamplingConfig
from spurline_rl.preparation import Preparation
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig
from spurline_rl.training_configs import ByPromptConfig
from spurline_rl.trajectory import Group, Trajectory

SAMPLES = 8
PROMPTS = 128
RANKS = (8, 6)
LIMIT_MS = 35.0
PAD = 0


def time_preparation(repeats: int) -> tuple[dict[str, Timing], list[Gate]]:
    """Time the preparation for each number of ranks, in turns."""
    groups = _groups(DATA_SETS["D1"].make().trajectories)
    backend: Any = _ScoredAlready(groups)
    preparations = {ranks: _preparation(ranks) for ranks in RANKS}
    ready = [preparations[RANKS[0]].ready(group) for group in groups]

    def prepare(ranks: int) -> None:
        preparations[ranks].prepare(ready, backend).release()

    names = {ranks: f"prepare D1 for {ranks} ranks" for ranks in RANKS}
    timings = round_robin({names[ranks]: lambda ranks=ranks: prepare(ranks) for ranks in RANKS}, repeats)
    gates = [
        Gate(f"{name}: ms", timing.min_s * 1000, LIMIT_MS, False, timing.min_cpu_s * 1000)
        for name, timing in timings.items()
    ]
    return timings, gates


class _ScoredAlready:
    """A backend whose logprobs take no time."""

    def __init__(self, groups: Sequence[Group]) -> None:
        longest = int(max(group.flat.lengths.max() for group in groups))
        random = np.random.default_rng(3)
        drawn = random.normal(-1, 0.1, (PROMPTS * SAMPLES, longest)).astype(np.float32)
        self._logprobs = torch.from_numpy(drawn)

    def logprobs(self, batch: TrainingBatch, role: str = "policy", *, temperature: float = 1.0) -> Tensor:
        return self._logprobs[:, : batch.length]


def _groups(trajectories: Sequence[Trajectory]) -> list[Group]:
    random = np.random.default_rng(4)
    return [
        Group(f"prompt-{draw}", draw, tuple(_rewarded(one, random.random()) for one in trajectories[start:][:SAMPLES]))
        for draw, start in enumerate(range(0, PROMPTS * SAMPLES, SAMPLES))
    ]


def _rewarded(trajectory: Trajectory, reward: float) -> Trajectory:
    """Return the attempt with this reward on its last token."""
    [turn] = trajectory.turns
    rewards = np.zeros(len(turn.response_ids), np.float32)
    rewards[-1] = reward
    return replace(trajectory, turns=(replace(turn, rewards=rewards),))


def _preparation(ranks: int) -> Preparation:
    config = RolloutSourceConfig(
        environment=EnvironmentConfig(name="any"),
        engine=RolloutEngineConfig(name="any"),
        prompts_per_step=PROMPTS,
        samples_per_prompt=SAMPLES,
        advantage=GrpoConfig(),
        correction=TruncatedImportanceSamplingConfig(cap=2.0),
        sampling=SamplingConfig(),
    )
    run = SimpleNamespace(
        collator=RolloutsCollatorConfig(), loss=PpoConfig(), minibatches=ByPromptConfig(prompts_per_minibatch=32)
    )
    context: Any = SimpleNamespace(
        config=run,
        host=PluginHost.load(["collation_fast"]),
        layout=ParallelLayout(data=ranks),
        tokenizer=SimpleNamespace(pad_token_id=PAD),
    )
    return Preparation(config, context)
