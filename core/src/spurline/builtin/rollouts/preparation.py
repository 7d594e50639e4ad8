"""From scored groups to the batch that is trained on: look back with the models, weigh, lay out.

Place on the way: scored groups -> rows (one per turn, or one per attempt) -> forwards by role -> rewards less KL ->
advantages -> TrainingBatch. Nothing here generates, and nothing updates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spurline.builtin.configs import ByPromptConfig
from spurline.builtin.rollouts.health import advantage_metrics, kl_reward_metrics, mismatch_metrics
from spurline.builtin.rollouts.turn_columns import TurnColumns
from spurline.data.batch import TrainingBatch
from spurline.data.tokenizer import pad_token_id
from spurline.protocols.advantage import Advantage
from spurline.protocols.backend import Backend, Role
from spurline.protocols.collator import RolloutCollator
from spurline.protocols.correction import Correction
from spurline.protocols.loss import Loss
from spurline.protocols.source_config import PromptSourceConfig
from spurline.rl.kl_in_reward import subtract_kl, token_kl
from spurline.rl.merging import merge_turns
from spurline.rl.trajectory import Group, Trajectory, Turn
from spurline.rl.turns import trajectories_of, turns_of, with_turns
from spurline.run_context import SourceContext


@dataclass(frozen=True)
class Prepared:
    """A batch with everything its loss needs, and the groups with the advantages it was made from."""

    batch: TrainingBatch
    groups: Sequence[Group]


class Preparation:
    """Prepares the groups of a step for the configured loss."""

    def __init__(self, config: PromptSourceConfig, context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
        self._config = config
        self._layout = context.layout
        self._collator: RolloutCollator = registry.create(
            "collator", run.collator, pad_token_id=pad_token_id(context.tokenizer), layout=context.layout
        )
        self._advantage: Advantage = registry.create("advantage", config.advantage)
        self._correction: Correction | None = (
            None if config.correction is None else registry.create("correction", config.correction)
        )
        loss: Loss = registry.create("loss", run.loss)
        self._needs_reference = config.kl_in_reward is not None or "reference_logprobs" in loss.needs
        self._needs_values = "values" in self._advantage.needs
        cut = run.minibatches
        size = cut.prompts_per_minibatch if isinstance(cut, ByPromptConfig) else None
        self._prompts_per_minibatch = size or config.prompts_per_step

    def describe(self) -> list[str]:
        """How rewards become what the loss is weighed by, in sentences."""
        config = self._config
        sentences = [self._advantage.describe()]
        if config.kl_in_reward is not None:
            penalty = config.kl_in_reward
            sentences.append(f"Each token's reward is less {penalty.coefficient:g} x KL ({penalty.estimator}).")
        if config.overlong is not None:
            sentences.append(
                f"Responses lose up to {config.overlong.penalty:g} of reward in the last "
                f"{config.overlong.buffer_tokens} of {config.sampling.max_new_tokens} tokens."
            )
        if self._correction is not None:
            sentences.append(self._correction.describe())
        return sentences

    def prepare(self, groups: Sequence[Group], backend: Backend) -> Prepared:
        """The batch of these scored groups. Its `info` has the health metrics and the time of the forwards."""
        trajectories, rows = self._rows(groups)
        laid_out = self._collator.collate_rollouts(trajectories)
        batch = laid_out.without_padding_rows()
        turns = turns_of(groups)
        columns = TurnColumns(batch, turns, rows)
        begin = time.perf_counter()
        looked_back = self._look_back(batch, columns, backend)
        seconds = time.perf_counter() - begin
        groups = with_turns(groups, _with_values(turns, columns, looked_back))
        groups, charged = self._less_kl(groups, columns, looked_back)
        groups = self._with_advantages(groups)
        batch = batch.with_tokens(**looked_back, **_computed(turns_of(groups), columns))
        batch, corrected = self._corrected(batch)
        metrics = {**mismatch_metrics(batch), **charged, **advantage_metrics(batch), **corrected}
        info = {**batch.info, **metrics, "time/look_back": seconds}
        batch = replace(batch, info=info, on_release=laid_out.on_release)
        return Prepared(batch, groups)

    def _rows(self, groups: Sequence[Group]) -> tuple[list[Trajectory], list[int]]:
        """What to lay out, one row per turn in it, and for each turn of the groups the row it comes to lie in."""
        laid_out: list[Trajectory] = []
        rows: list[int] = []
        next_row = 0
        for trajectory in trajectories_of(groups):
            kept = merge_turns(trajectory) if self._config.turns == "merged" else trajectory
            shared = len(kept.turns) < len(trajectory.turns)
            rows += [next_row if shared else next_row + number for number in range(len(trajectory.turns))]
            next_row += len(kept.turns)
            laid_out.append(kept)
        return laid_out, rows

    def _look_back(self, batch: TrainingBatch, columns: TurnColumns, backend: Backend) -> dict[str, Tensor]:
        """What the models say about these tokens before the update, each `[rows, length]`."""
        padded = batch.pad_rows(self._layout.data)
        roles: list[tuple[str, Role]] = [("old_logprobs", "policy")]
        if self._needs_reference:
            roles.append(("reference_logprobs", "reference"))
        temperature = self._config.sampling.temperature
        found = {column: backend.logprobs(padded, role, temperature=temperature) for column, role in roles}
        if self._needs_values:
            # Estimates run from token to token, through those that are not trained on too.
            whole = batch.with_tokens(loss_weights=columns.responses()).pad_rows(self._layout.data)
            found["values"] = backend.logprobs(whole, "critic")
        return found

    def _less_kl(
        self, groups: Sequence[Group], columns: TurnColumns, looked_back: Mapping[str, Tensor]
    ) -> tuple[Sequence[Group], Mapping[str, float]]:
        """The groups with rewards less their KL, and what was charged."""
        penalty = self._config.kl_in_reward
        if penalty is None:
            return groups, {}
        old = columns.split(looked_back["old_logprobs"])
        reference = columns.split(looked_back["reference_logprobs"])
        kl = [token_kl(now, before, penalty.estimator) for now, before in zip(old, reference, strict=True)]
        charged: list[Turn] = []
        for turn, of_turn in zip(turns_of(groups), kl, strict=True):
            assert turn.rewards is not None, "a turn was not scored"
            rewards = subtract_kl(turn.rewards, of_turn, coefficient=penalty.coefficient)
            charged.append(replace(turn, rewards=rewards))
        groups = with_turns(groups, charged)
        return groups, kl_reward_metrics(groups, kl)

    def _with_advantages(self, groups: Sequence[Group]) -> list[Group]:
        size = len(groups) if self._config.advantage_scope == "batch" else self._prompts_per_minibatch
        scopes = [groups[start : start + size] for start in range(0, len(groups), max(1, size))]
        return [group for scope in scopes for group in self._advantage.advantages(scope)]

    def _corrected(self, batch: TrainingBatch) -> tuple[TrainingBatch, Mapping[str, float]]:
        if self._correction is None:
            return batch, {}
        corrected = self._correction.correct(batch)
        return batch.with_tokens(correction_factors=corrected.factors), corrected.metrics


def _with_values(turns: list[Turn], columns: TurnColumns, looked_back: Mapping[str, Tensor]) -> list[Turn]:
    if "values" not in looked_back:
        return turns
    values = columns.split(looked_back["values"])
    return [replace(turn, values=found) for turn, found in zip(turns, values, strict=True)]


def _computed(turns: Sequence[Turn], columns: TurnColumns) -> dict[str, Tensor]:
    """The columns that were computed turn by turn; `returns` only where there is a critic."""
    names = ["rewards", "advantages"]
    if turns and turns[0].returns is not None:
        names.append("returns")
    return {
        name: columns.join(name, cast("list[NDArray[np.float32]]", [getattr(turn, name) for turn in turns]))
        for name in names
    }
