"""What `Preparation` must give, computed token by token with plain numpy and Python, and the fake model behind it.

The model's words about a token are a pure function of the token, its position, the role and the temperature, so that
each number in a batch tells where it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rl_attempts import core_registry
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.protocols.backend import Role
from spurline.protocols.collator import ParallelLayout
from spurline.testing.samples import PAD
from spurline_rl.configs import RolloutsCollatorConfig, RolloutSourceConfig
from spurline_rl.losses.configs import PpoConfig
from spurline_rl.preparation import Preparation
from spurline_rl.protocols.advantage import Advantage
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.scored_groups import ScoredGroups
from spurline_rl.training_configs import ByPromptConfig
from spurline_rl.trajectory import Group, Trajectory, Turn, merge_turns, turns_of, with_turns

Row = dict[str, NDArray[Any]]
"""One row without padding: column -> values [tokens]."""

_OFFSETS = {"policy": 0, "reference": 5, "critic": 11}
GAMMA, LAM, EPS = 0.9, 0.7, 1e-8
CAP = 1.5


def says(token: int, position: int, role: Role, temperature: float = 1.0) -> float:
    """Return the logprob or value that the fake model gives a token, always below 0."""
    return -(1 + (7 * token + 13 * position + _OFFSETS[role]) % 17) / 17 / temperature


@dataclass
class FakeBackend:
    """Keeps a backend's contract for `logprobs`: whole ranks in, real rows out, zeros where there is no loss."""

    ranks: int
    asked: list[tuple[Role, float]] = field(default_factory=list[tuple[Role, float]])

    def logprobs(self, batch: TrainingBatch, role: Role = "policy", *, temperature: float = 1.0) -> Tensor:
        assert batch.num_rows % self.ranks == 0, "rows do not divide among ranks"
        self.asked.append((role, temperature))
        real = batch.without_padding_rows()
        found = torch.zeros(real.num_rows, real.length)
        for row, column in torch.nonzero(real.tokens["loss_weights"]).tolist():
            token, position = (int(real.tokens[name][row, column]) for name in ("input_ids", "position_ids"))
            found[row, column] = says(token, position, role, temperature)
        return found


def make_preparation(config: RolloutSourceConfig, ranks: int = 1, **run: Any) -> Preparation:
    """Make a preparation for mini-batches of 2 prompts. run: other sections of the run's config."""
    sections = {"collator": RolloutsCollatorConfig(), "loss": PpoConfig()}
    sections |= {"minibatches": ByPromptConfig(prompts_per_minibatch=2)} | run
    context: Any = SimpleNamespace(
        config=SimpleNamespace(**sections),
        host=SimpleNamespace(registry=core_registry()),
        layout=ParallelLayout(data=ranks),
        tokenizer=SimpleNamespace(pad_token_id=PAD),
    )
    return Preparation(config, context)


def make_groups(prompts: int, samples: int, seed: int = 3) -> list[Group]:
    """Make attempts of 2 or 3 turns, which continue each other except in sample 1. Some tokens are not trained."""
    random = np.random.default_rng(seed)
    groups: list[Group] = []
    for prompt in range(prompts):
        attempts = []
        for sample in range(samples):
            context = random.integers(1, 99, random.integers(1, 4)).tolist()
            turns: list[Turn] = []
            for number in range(3 if prompt * sample % 3 == 1 else 2):
                turns.append(_make_turn(random, context))
                context = [*context, *turns[-1].response_ids.tolist(), *random.integers(1, 99, number).tolist()]
                if sample == 1:
                    context[0] += 1
            attempts.append(Trajectory(f"prompt-{prompt}", sample, tuple(turns)))
        groups.append(Group(f"prompt-{prompt}", prompt, tuple(attempts)))
    return groups


def _make_turn(random: np.random.Generator, context: Sequence[int]) -> Turn:
    length = int(random.integers(2, 5))
    mask = random.integers(0, 2, length)
    mask[random.integers(length)] = 1
    return Turn(
        np.array(context, np.int32),
        random.integers(1, 99, length).astype(np.int32),
        mask.astype(np.uint8),
        logprobs=(-1.5 * random.random(length)).astype(np.float32),
        versions=np.zeros(length, np.int32),
        rewards=random.normal(size=length).astype(np.float32),
    )


@dataclass
class Oracle:
    """kl: coefficient of the k1 estimate in the reward, 0 for none. scope: groups that are normalised together."""

    temperature: float
    kl: float
    scope: int
    merged: bool
    critic: bool

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        """The expected rows, in order."""
        turns = [[self._turn(turn) for turn in attempt.turns] for group in groups for attempt in group.trajectories]
        samples = len(groups[0].trajectories)
        per_scope = self.scope * samples
        for start in range(0, len(turns), per_scope):
            if self.critic:
                _add_gae(turns[start : start + per_scope])
        if not self.critic:
            for start in range(0, len(turns), samples):
                _add_rloo(turns[start : start + samples])
        attempts = [attempt for group in groups for attempt in group.trajectories]
        return [row for attempt, found in zip(attempts, turns, strict=True) for row in self._rows(attempt, found)]

    def _turn(self, turn: Turn) -> Row:
        """Columns of the response tokens of a turn."""
        places = [(int(token), len(turn.prompt_ids) + number) for number, token in enumerate(turn.response_ids)]
        mask = turn.loss_mask.astype(np.float64)
        old = mask * [says(*place, "policy", self.temperature) for place in places]
        reference = mask * [says(*place, "reference", self.temperature) for place in places]
        assert turn.rewards is not None
        assert turn.logprobs is not None
        found = {
            "loss_weights": mask,
            "old_logprobs": old,
            "rollout_logprobs": turn.logprobs,
            "rewards": turn.rewards - self.kl * (old - reference),
            "correction_factors": np.where(mask, np.minimum(np.exp(old - turn.logprobs), CAP), 1.0),
        }
        if self.kl:
            found["reference_logprobs"] = reference
        if self.critic:
            found["values"] = np.array([says(*place, "critic") for place in places])
        return found

    def _rows(self, attempt: Trajectory, turns: Sequence[Row]) -> list[Row]:
        """Return one row per turn, or one row for all if the turns continue each other."""
        one_for_all = self.merged and attempt.sample != 1
        last = attempt.turns[-1]
        rows: list[Row] = []
        for turn, columns in zip(attempt.turns, turns, strict=True):
            if not rows or not one_for_all:
                whole = last if one_for_all else turn
                tokens = np.concatenate([whole.prompt_ids, whole.response_ids])
                rows.append({name: np.full(len(tokens), float(name == "correction_factors")) for name in columns})
                rows[-1]["input_ids"] = tokens
            place = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.response_ids))
            for name, values in columns.items():
                rows[-1][name][place] = values
        return rows


def batch_of_records(
    groups: Sequence[Group], advantage: Advantage, *, scope: int, merged: bool, carry: Sequence[str]
) -> TrainingBatch:
    """Make the batch without columns of models, record by record: every turn gets its columns, and core's readable
    collator lays the turns out.

    scope: groups that are compared together. carry: names of the groups' numbers to lay out.
    """
    scopes = [groups[start : start + scope] for start in range(0, len(groups), scope)]
    computed = np.concatenate([advantage.advantages(ScoredGroups(given))["advantages"] for given in scopes])
    batch = _laid_out(groups, merged).with_tokens(advantages=_column(groups, computed, merged))
    for name in carry:
        counts = [sum(len(turn.response_ids) for turn in turns_of([group])) for group in groups]
        numbers = np.repeat([group.columns[name] for group in groups], counts)
        batch = batch.with_tokens(**{name: _column(groups, numbers, merged)})
    return batch


def _column(groups: Sequence[Group], values: NDArray[Any], merged: bool) -> Tensor:
    """Lay the values out as rewards are."""
    rest = iter(values.astype(np.float32))
    turns = [replace(turn, rewards=[next(rest) for _ in turn.response_ids]) for turn in turns_of(groups)]
    return _laid_out(with_turns(groups, turns), merged).tokens["rewards"]


def _laid_out(groups: Sequence[Group], merged: bool) -> TrainingBatch:
    if merged:
        groups = [replace(group, trajectories=tuple(map(merge_turns, group.trajectories))) for group in groups]
    return RolloutsCollator(RolloutsCollatorConfig(), PAD, ParallelLayout()).collate_rollouts(groups)


def _add_gae(attempts: Sequence[Sequence[Row]]) -> None:
    for turns in attempts:
        tokens = [(turn, number) for turn in turns for number in range(len(turn["rewards"]))]
        for turn in turns:
            turn["advantages"], turn["returns"] = np.zeros((2, len(turn["rewards"])))
        next_value = advantage = 0.0
        for turn, number in reversed(tokens):
            value = turn["values"][number]
            advantage = turn["rewards"][number] + GAMMA * next_value - value + GAMMA * LAM * advantage
            turn["advantages"][number], turn["returns"][number] = advantage, advantage + value
            next_value = value
    every = [turn for turns in attempts for turn in turns]
    trained = [value for turn in every for value in turn["advantages"][turn["loss_weights"] != 0]]
    mean = math.fsum(trained) / len(trained)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in trained) / len(trained))
    for turn in every:
        turn["advantages"] = (turn["advantages"] - mean) / (std + EPS)


def _add_rloo(samples: Sequence[Sequence[Row]]) -> None:
    returns = [math.fsum(value for turn in turns for value in turn["rewards"]) for turns in samples]
    for number, turns in enumerate(samples):
        others = returns[:number] + returns[number + 1 :]
        for turn in turns:
            turn["advantages"] = np.full(len(turn["rewards"]), returns[number] - math.fsum(others) / len(others))
