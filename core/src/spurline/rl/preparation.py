"""From scored groups to the batch that is trained on: score the tokens with the models, compare, lay out.

Place on the way: scored groups -> rows (one per turn, or one per attempt) -> forwards by role -> rewards less KL ->
advantages -> TrainingBatch. Nothing here generates, and nothing updates.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, ROUTED_EXPERTS, TOKEN_COLUMNS, TrainingBatch
from spurline.data.tokenizer import pad_token_id
from spurline.errors import ConfigError, DataError
from spurline.losses.log_ratios import BatchLogRatios
from spurline.losses.policy_loss import kl_estimate
from spurline.protocols.advantage import Advantage
from spurline.protocols.backend import Backend, Role
from spurline.protocols.collator import RolloutCollator
from spurline.protocols.correction import Correction
from spurline.protocols.loss import Loss
from spurline.protocols.source import SourceContext
from spurline.rl.configs import PromptSourceConfig
from spurline.rl.health import kl_reward_metrics
from spurline.rl.token_metrics import advantage_metrics, mismatch_metrics
from spurline.rl.trajectory import Group, Trajectory, Turn, merge_turns, trajectories_of, turns_of, with_turns


class TurnColumns:
    """Where the responses of turns lie in a batch without padding rows, one segment per row.

    rows: for each turn the row that holds it, be it the turn's own or shared by all turns of an attempt. A turn's
    prompt is the whole context it saw, so its response begins that many tokens after the row's first one.
    """

    def __init__(self, batch: TrainingBatch, turns: Sequence[Turn], rows: Sequence[int]) -> None:
        assert not bool(batch.is_padding_row.any()), "padding rows hold no turn"
        self._shape = (batch.num_rows, batch.length)
        # argmax finds the first of equal values: the first token of the row's segment.
        first = np.argmax(batch.tokens["segment_ids"].numpy() > 0, axis=1)
        self._places: list[tuple[int, slice]] = []
        for turn, row in zip(turns, rows, strict=True):
            start = int(first[row]) + len(turn.prompt_ids)
            self._places.append((row, slice(start, start + len(turn.response_ids))))

    def split(self, column: Tensor) -> list[NDArray[Any]]:
        """Values `[rows, length]` as one array per turn, those of its response tokens."""
        values = column.numpy()
        return [values[place] for place in self._places]

    def responses(self) -> Tensor:
        """float32 `[rows, length]`: 1 on every response token, 0 elsewhere."""
        column = torch.zeros(self._shape, dtype=torch.float32)
        for place in self._places:
            column.numpy()[place] = 1
        return column

    def join(self, name: str, values: Sequence[NDArray[np.float32]]) -> Tensor:
        """One array per turn as the column `name`, zero everywhere else."""
        column = torch.zeros(self._shape, dtype=OPTIONAL_TOKEN_COLUMNS.get(name, torch.float32))
        target = column.numpy()
        for place, found in zip(self._places, values, strict=True):
            target[place] = found
        return column


@dataclass(frozen=True)
class Prepared:
    """A batch with everything its loss needs, and the groups with the advantages it was made from."""

    batch: TrainingBatch
    groups: Sequence[Group]


class Preparation:
    """Prepares the groups of a step for the configured loss."""

    def __init__(self, config: PromptSourceConfig, context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
        _refuse_taken_columns(config.carry)
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
        self._prompts_per_minibatch = run.minibatches.minibatch_prompts(config.prompts_per_step)

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
        if not self._config.router_replay:
            groups = _without_experts(groups)
        trajectories, rows = self._choose_rows(groups)
        laid_out = self._collator.collate_rollouts(trajectories)
        batch = laid_out.without_padding_rows()
        if self._config.router_replay:
            _check_experts(batch, trajectories)
        turns = turns_of(groups)
        columns = TurnColumns(batch, turns, rows)
        begin = time.perf_counter()
        scored = self._score_tokens(batch, columns, backend)
        seconds = time.perf_counter() - begin
        if "values" in scored:
            values = zip(turns, columns.split(scored["values"]), strict=True)
            groups = with_turns(groups, [replace(turn, values=found) for turn, found in values])
        groups, charged = self._charge_kl(groups, columns, scored)
        groups = self._set_advantages(groups)
        carried = _join_carried(groups, self._config.carry, columns)
        batch = batch.with_tokens(**scored, **_join_computed(turns_of(groups), columns), **carried)
        batch, compared = self._compare(batch)
        metrics = {**compared, **charged, **advantage_metrics(batch)}
        info = {**batch.info, **metrics, "time/look_back": seconds}
        batch = replace(batch, info=info, on_release=laid_out.on_release)
        return Prepared(batch, groups)

    def _choose_rows(self, groups: Sequence[Group]) -> tuple[list[Trajectory], list[int]]:
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

    def _score_tokens(self, batch: TrainingBatch, columns: TurnColumns, backend: Backend) -> dict[str, Tensor]:
        """What the models say about these tokens before the update, each `[rows, length]`."""
        padded = batch.pad_rows(self._layout.data)
        roles: list[tuple[str, Role]] = [("old_logprobs", "policy")]
        if self._needs_reference:
            roles.append(("reference_logprobs", "reference"))
        temperature = self._config.sampling.temperature
        found = {column: backend.logprobs(padded, role, temperature=temperature) for column, role in roles}
        if self._needs_values:
            # Estimates run from token to token, through those that are not trained on too.
            responses = batch.with_tokens(loss_weights=columns.responses()).pad_rows(self._layout.data)
            found["values"] = backend.logprobs(responses, "critic")
        return found

    def _charge_kl(
        self, groups: Sequence[Group], columns: TurnColumns, scored: Mapping[str, Tensor]
    ) -> tuple[Sequence[Group], Mapping[str, float]]:
        """The groups with their KL from the reference model taken from each token's reward, and metrics of it.

        This is the KL-in-reward of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155), whose estimator is k1: unbiased,
        and harmless here, where it is not differentiated.
        """
        penalty = self._config.kl_in_reward
        if penalty is None:
            return groups, {}
        old, reference = scored["old_logprobs"].double(), scored["reference_logprobs"].double()
        kl = columns.split(kl_estimate(old, reference, penalty.estimator))
        charged: list[Turn] = []
        for turn, turn_kl in zip(turns_of(groups), kl, strict=True):
            assert turn.rewards is not None, "a turn was not scored"
            charged.append(replace(turn, rewards=turn.rewards - penalty.coefficient * turn_kl))
        groups = with_turns(groups, charged)
        return groups, kl_reward_metrics(groups, kl)

    def _set_advantages(self, groups: Sequence[Group]) -> list[Group]:
        size = len(groups) if self._config.advantage_scope == "batch" else self._prompts_per_minibatch
        assert size is not None, "the config refuses this scope where it does not know the size"
        scopes = [groups[start : start + size] for start in range(0, len(groups), max(1, size))]
        return [group for scope in scopes for group in self._advantage.advantages(scope)]

    def _compare(self, batch: TrainingBatch) -> tuple[TrainingBatch, Mapping[str, float]]:
        """The batch with the factors that correct for its mismatch with the engine, and metrics of both."""
        if self._correction is None and not BatchLogRatios.can_be_made_of(batch):
            return batch, {}
        ratios = BatchLogRatios(batch)
        metrics = mismatch_metrics(ratios.values)
        if self._correction is None:
            return batch, metrics
        factors, corrected = ratios.correct(self._correction)
        return batch.with_tokens(correction_factors=factors), {**metrics, **corrected}


def _join_computed(turns: Sequence[Turn], columns: TurnColumns) -> dict[str, Tensor]:
    """The columns that were computed turn by turn; there are `returns` only with a critic."""
    names = ["rewards", "advantages"]
    if turns and turns[0].returns is not None:
        names.append("returns")
    return {
        name: columns.join(name, cast("list[NDArray[np.float32]]", [getattr(turn, name) for turn in turns]))
        for name in names
    }


def _without_experts(groups: Sequence[Group]) -> Sequence[Group]:
    """The groups without the experts that a recording has, which would be laid out, sent to ranks and replayed."""
    if all(turn.routed_experts is None for turn in turns_of(groups)):
        return groups
    return with_turns(groups, [replace(turn, routed_experts=None) for turn in turns_of(groups)])


def _check_experts(batch: TrainingBatch, trajectories: Sequence[Trajectory]) -> None:
    """Raise DataError unless every turn has its experts: without, the models would silently choose others."""
    if batch.num_rows == 0 or ROUTED_EXPERTS in batch.tokens:
        return
    lacking = [item for item in trajectories if any(turn.routed_experts is None for turn in item.turns)]
    named = f"sample {lacking[0].sample} of prompt '{lacking[0].uid}'" if lacking else "the batch"
    raise DataError(
        f"source.router_replay is true, and {named} has turns without the experts that were chosen for them. Set it to "
        "false, or use an engine that notes them; a recording must have been made with it too."
    )


def _refuse_taken_columns(names: Sequence[str]) -> None:
    """Raise ConfigError for a carried column that would take the place of one that batches have."""
    for name in names:
        if name in TOKEN_COLUMNS or name in OPTIONAL_TOKEN_COLUMNS:
            raise ConfigError.at(
                "source.carry",
                f"names '{name}', which batches have a column of their own for. Rename the column in the data.",
            )


def _join_carried(groups: Sequence[Group], names: Sequence[str], columns: TurnColumns) -> dict[str, Tensor]:
    """Each carried number of a prompt's row, on the response tokens of all turns of its group."""
    return {
        name: columns.join(
            name,
            [
                np.full(len(turn.response_ids), _column_of(group, name), np.float32)
                for group in groups
                for turn in turns_of([group])
            ],
        )
        for name in names
    }


def _column_of(group: Group, name: str) -> float:
    if name not in group.columns:
        raise DataError(
            f"The group of prompt '{group.uid}' has no column '{name}', which source.carry names: it was recorded "
            "without it. Record with the same `carry`, or remove the name."
        )
    return group.columns[name]
