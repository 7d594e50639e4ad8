"""Make the batch of a step from scored groups. This computes logprobs and advantages, and updates no weights.

Data flow: scored groups -> rows (one per turn, or one per attempt) -> logprobs and values of tokens -> rewards minus KL
-> advantages -> TrainingBatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, ROUTED_EXPERTS, SUPPORT, TrainingBatch
from spurline.data.token_store import joined
from spurline.errors import DataError, PluginError, RunFailedError
from spurline.protocols.backend import Backend, Role
from spurline.protocols.loss import Loss
from spurline.protocols.source import SourceContext
from spurline_rl.configs import PromptSourceConfig
from spurline_rl.losses.corrections import compare
from spurline_rl.losses.policy_loss import kl_estimate
from spurline_rl.metrics import advantage_metrics
from spurline_rl.protocols.advantage import Advantage
from spurline_rl.protocols.correction import Correction
from spurline_rl.rollout_batches import RolloutCollator
from spurline_rl.scored_groups import ScoredGroups, flat_field
from spurline_rl.trajectory import (
    Group,
    Trajectory,
    Turn,
    in_one_block,
    trajectories_of,
    turns_of,
    with_fields,
    with_turns,
)
from spurline_text.sources.sft import refuse_columns_of_batches
from spurline_text.tokenizer import pad_token_id

_LOGPROBS = "_logprobs"
"""Ending of the names of columns with a model's logprobs. The role of the model comes before it."""


class TurnColumns:
    """The positions of each turn's response in a batch, which has one segment per row and no padding rows.

    Args:
        groups: Groups with all turns.
        laid_out: The same groups with one turn for each row of the batch. A merged attempt has one turn here.
    """

    def __init__(self, batch: TrainingBatch, groups: Sequence[Group], laid_out: Sequence[Group]) -> None:
        assert not bool(batch.is_padding_row.any()), "padding rows hold no turn"
        self._shape = (batch.num_rows, batch.length)
        turns, attempt_rows = flat_field(groups, "attempt_turns"), flat_field(laid_out, "attempt_turns")
        numbers = flat_field(groups, "numbers")
        first_rows = np.repeat(np.cumsum(attempt_rows) - attempt_rows, turns)
        rows = first_rows + np.where(np.repeat(attempt_rows < turns, turns), 0, numbers)
        # argmax finds the first of equal values.
        is_token = batch.tokens["segment_ids"].numpy() > 0
        first = is_token.argmax(axis=1) if is_token.size else np.zeros(len(is_token), np.int64)
        # A turn's prompt is its whole context, so the response begins `num_prompt` tokens after the row's first token.
        starts = first[rows] + flat_field(groups, "num_prompt")
        stops = starts + flat_field(groups, "num_response")
        self.num_tokens = int((stops - starts).sum())
        bounds = zip(rows.tolist(), starts.tolist(), stops.tolist(), strict=True)
        self._places = [(row, slice(start, stop)) for row, start, stop in bounds]

    def split(self, column: Tensor) -> list[NDArray[Any]]:
        """Return the values of each turn's response tokens, given a column `[rows, length]`."""
        values = column.numpy()
        return [values[place] for place in self._places]

    def flatten(self, column: Tensor) -> NDArray[Any]:
        """Return the values of all response tokens [A], turn after turn, given a column `[rows, length]`."""
        return joined(self.split(column), column.numpy().dtype)

    def join(self, name: str, values: NDArray[Any]) -> Tensor:
        """Return the column `name`, given the values of response tokens [A, ...], turn after turn. The rest is 0."""
        usual = torch.int32 if np.issubdtype(values.dtype, np.integer) else torch.float32
        dtype = torch.empty(0, dtype=OPTIONAL_TOKEN_COLUMNS.get(name, usual)).numpy().dtype
        # numpy asks the kernel for huge pages, torch does not.
        column = torch.from_numpy(np.zeros((*self._shape, *values.shape[1:]), dtype))
        target, start = column.numpy(), 0
        for row, place in self._places:
            stop = start + place.stop - place.start
            target[row, place] = values[start:stop]
            start = stop
        assert start == len(values), f"{name} has {len(values)} values for {start} response tokens"
        return column


class Preparation:
    """Prepares the groups of a step for the configured loss."""

    def __init__(self, config: PromptSourceConfig, context: SourceContext) -> None:
        run, registry = context.config, context.host.registry
        refuse_columns_of_batches(config.carry)
        self._config = config
        self._layout = context.layout
        self._collator: RolloutCollator = registry.create(
            "collator", run.collator, pad_token_id=pad_token_id(context.tokenizer), layout=context.layout
        )
        parts = {"registry": registry} if config.advantage.has_parts else {}
        self._advantage: Advantage = registry.create("advantage", config.advantage, **parts)
        self._correction: Correction | None = (
            None if config.correction is None else registry.create("correction", config.correction)
        )
        loss: Loss = registry.create("loss", run.loss)
        self._needs_values = "values" in self._advantage.needs
        self._added = [name for scorer in config.scorers for name in scorer.columns]
        needs = {*self._advantage.needs, *loss.needs, *({"reference_logprobs"} if config.kl_in_reward else ())}
        given = {"rollout_logprobs", *self._added, *config.carry, *getattr(loss, "prepares", ())}
        self._roles = {"old_logprobs": "policy"} | {
            name: name.removesuffix(_LOGPROBS)
            for name in sorted(needs - given - {"old_logprobs"})
            if name.endswith(_LOGPROBS)
        }
        self._prompts_per_minibatch = run.minibatches.minibatch_prompts(config.prompts_per_step)

    def describe(self) -> list[str]:
        """Describe in sentences how rewards become weights of the loss."""
        config, penalty = self._config, self._config.kl_in_reward
        sentences = [self._advantage.describe()]
        if penalty is not None:
            sentences.append(f"{penalty.coefficient:g} x KL ({penalty.estimator}) is subtracted from token rewards.")
        if config.overlong is not None:
            sentences.append(
                f"Responses lose up to {config.overlong.penalty:g} of reward in the last "
                f"{config.overlong.buffer_tokens} of {config.sampling.max_new_tokens} tokens."
            )
        if self._correction is not None:
            sentences.append(self._correction.describe())
        return sentences

    def ready(self, group: Group) -> Group:
        """Compute all values of the group that a batch needs and that do not depend on weights. Returns the new group.

        It may be called on any thread when a group is finished. `prepare` also accepts groups without these values.
        """
        ready = in_one_block(group)
        _ = ready.returns, self._rows_of(ready).flat
        if "versions" in ready.flat.columns:
            _ = ready.flat.trained_versions
        return ready

    def prepare(self, groups: Sequence[Group], backend: Backend) -> TrainingBatch:
        """Return the batch of these scored groups. Its `info` has health metrics and the seconds of forward passes."""
        if not self._config.router_replay and any(group.flat.routed_experts is not None for group in groups):
            # Recorded rollouts may have experts, which must not be replayed.
            groups = with_turns(groups, [replace(turn, routed_experts=None) for turn in turns_of(groups)])
        laid_out = self._lay_out(groups)
        if self._config.router_replay:
            _check_experts(laid_out, [self._rows_of(group) for group in groups])
        batch = laid_out.without_padding_rows()
        if self._config.sampling.top_k and batch.num_rows:
            _check_support(batch)
        columns = self.turn_columns(batch, groups)
        begin = time.perf_counter()
        scores = self._score_tokens(laid_out, columns, groups, backend)
        seconds = time.perf_counter() - begin
        computed: dict[str, Tensor] = {}
        values = {name: columns.flatten(scores[name]) for name in self._advantage.needs if name in scores}
        scored, charged = self._charge_kl(ScoredGroups(groups, values), columns, scores)
        if charged or "rewards" not in batch.tokens:
            computed["rewards"] = columns.join("rewards", scored.column("rewards"))
        computed |= {name: columns.join(name, found) for name, found in self._advantages(scored).items()}
        carried = _join_carried(groups, self._config.carry, columns)
        added = {name: columns.join(name, scored.column(name)) for name in self._added}
        batch = batch.with_tokens(**scores, **computed, **carried, **added)
        batch, compared = compare(batch, self._correction)
        metrics = {**compared, **charged, **advantage_metrics(batch)}
        info = {**batch.info, **metrics, "time/look_back": seconds}
        return replace(batch, info=info, on_release=laid_out.on_release)

    def with_model_rewards(self, groups: Sequence[Group], backend: Backend) -> list[Group]:
        """Return the groups with the rewards that models of the backend give (`RewardConfig.scored_by`).

        A model reads the prompt and the response of each attempt's last turn. Its score after the last token is the
        reward.
        """
        environment = self._config.environment
        # With several environments, some attempts may have no such reward.
        scored = [group for group in groups if environment.part(group.environment).model_rewards]
        if not scored:
            return list(groups)
        laid_out = self._lay_out(scored)
        columns = self.turn_columns(laid_out.without_padding_rows(), scored)
        weighed = _weigh_all(laid_out.pad_rows(self._layout.data), columns)
        roles = environment.model_rewards
        found = {term: columns.split(backend.logprobs(weighed, role)) for term, role in roles.items()}
        laid_out.release()
        begins = iter(np.cumsum([0, *(len(attempt.turns) for attempt in trajectories_of(scored))]).tolist())

        def rewarded(attempt: Trajectory) -> Trajectory:
            begin = next(begins)
            last = max(number for number, turn in enumerate(attempt.turns) if len(turn.response_ids))
            terms = environment.part(attempt.environment).model_rewards
            return self._rewarded(attempt, last, {term: float(found[term][begin + last][-1]) for term in terms})

        changed = {
            group.draw: replace(group, trajectories=tuple(map(rewarded, group.trajectories))) for group in scored
        }
        return [changed.get(group.draw, group) for group in groups]

    def _rewarded(self, attempt: Trajectory, last: int, scores: Mapping[str, float]) -> Trajectory:
        """Give an attempt these reward terms, and add them to the reward of the last token of the turn `last`."""
        turns, total = list(attempt.turns), 0.0
        for term, score in scores.items():
            if not math.isfinite(score):
                raise RunFailedError(f"The model that gives the reward '{term}' returned {score} for {attempt.uid}.")
            # Recorded attempts already have an earlier score. Others have 0.
            total += self._config.reward_weights.get(term, 1.0) * (score - attempt.rewards[term])
        before = turns[last].rewards
        assert before is not None, "scored attempts have rewards for each token"
        turns[last] = with_fields(turns[last], rewards=np.append(before[:-1], before[-1] + np.float32(total)))
        return with_fields(attempt, rewards={**attempt.rewards, **scores}, turns=tuple(turns))

    def _rows_of(self, group: Group) -> Group:
        return group.merged if self._config.turns == "merged" else group

    def _lay_out(self, groups: Sequence[Group]) -> TrainingBatch:
        return self._collator.collate_rollouts([self._rows_of(group) for group in groups])

    def logprobs_of(self, turns: Sequence[Turn], backend: Backend, role: Role = "policy") -> list[NDArray[np.float32]]:
        """Return the backend's logprobs of the response tokens of these turns, as the loss uses them."""
        groups = [Group("turns", 0, tuple(Trajectory("turns", number, (turn,)) for number, turn in enumerate(turns)))]
        laid_out = self._lay_out(groups)
        batch = laid_out.without_padding_rows()
        padded = laid_out.pad_rows(self._layout.data)
        logprobs = backend.logprobs(padded, role, temperature=self._config.sampling.temperature)
        found = [values.copy() for values in self.turn_columns(batch, groups).split(logprobs)]
        laid_out.release()
        return found

    def turn_columns(self, batch: TrainingBatch, groups: Sequence[Group]) -> TurnColumns:
        """Return the positions of each turn's response in the batch of these groups."""
        return TurnColumns(batch, groups, [self._rows_of(group) for group in groups])

    def _score_tokens(
        self, laid_out: TrainingBatch, columns: TurnColumns, groups: Sequence[Group], backend: Backend
    ) -> dict[str, Tensor]:
        """Compute logprobs, and a critic's values, before the update. Returns columns without padding rows."""
        padded = laid_out.pad_rows(self._layout.data)
        temperature = self._config.sampling.temperature
        found: dict[str, Tensor] = {}
        for name, role in self._roles.items():
            if any(role in group.prompts for group in groups):
                turns = turns_with_prompts(groups, role)
                found[name] = columns.join(name, np.concatenate(self.logprobs_of(turns, backend, role)))
            else:
                found[name] = backend.logprobs(padded, role, temperature=temperature)
        if self._needs_values:
            found["values"] = backend.logprobs(_weigh_all(padded, columns), "critic")
        return found

    def _charge_kl(
        self, scored: ScoredGroups, columns: TurnColumns, scores: Mapping[str, Tensor]
    ) -> tuple[ScoredGroups, Mapping[str, float]]:
        """Lower each token's reward by its KL to the reference model. Returns the groups with new rewards, and metrics.

        This is the KL-in-reward of InstructGPT (Ouyang et al. 2022, arXiv:2203.02155). The estimator k1 is unbiased.
        Its gradient is 0 on average, which does not matter here, since rewards are not differentiated.
        """
        penalty = self._config.kl_in_reward
        if penalty is None:
            return scored, {}
        old, reference = scores["old_logprobs"].double(), scores["reference_logprobs"].double()
        kl = columns.flatten(kl_estimate(old, reference, penalty.estimator))
        rewards = (scored.column("rewards") - penalty.coefficient * kl).astype(np.float32)
        charged = replace(scored, computed={**scored.computed, "rewards": rewards})
        of_trained = kl[scored.column("loss_mask") != 0]
        # This mean is not multiplied by the coefficient.
        metrics = {"kl_reward/mean": float(of_trained.mean())} if len(of_trained) else {}
        return charged, {**metrics, "reward/after_kl": float(np.concatenate(charged.returns).mean())}

    def _advantages(self, scored: ScoredGroups) -> Mapping[str, NDArray[np.float32]]:
        """Return `advantages` [A], and `returns` [A] if a critic is trained."""
        if self._config.samples_per_prompt < self._config.advantage.smallest_group:
            # Only a run that learns from a teacher may have such groups, and its loss does not read this column.
            return {"advantages": np.zeros(int(scored.attempt_tokens.sum()), np.float32)}
        size = len(scored.groups) if self._config.advantage_scope == "batch" else self._prompts_per_minibatch
        assert size is not None, "the config refuses advantage_scope: minibatch if the size is not known"
        found = [self._advantages_together(scope) for scope in scored.cut(max(1, size))]
        return {name: np.concatenate([columns[name] for columns in found]) for name in found[0]}

    def _advantages_together(self, scored: ScoredGroups) -> Mapping[str, NDArray[np.float32]]:
        """Return the columns of the groups of one scope."""
        tokens = None
        if self._config.cut_off.leaves_baseline:
            scored, tokens = scored.counted(self._config.advantage.smallest_group)
        columns, wanted = self._advantage.advantages(scored), int(scored.attempt_tokens.sum())
        shapes = {name: np.shape(values) for name, values in columns.items()}
        if not {"advantages"} <= shapes.keys() <= {"advantages", "returns"} or {*shapes.values()} != {(wanted,)}:
            raise PluginError(
                f"{type(self._advantage).__name__}.advantages returned {shapes}. Return a mapping with `advantages`, "
                f"and `returns` for a critic, each with a number for each of the {wanted} response tokens."
            )
        return columns if tokens is None else {name: _placed(values, tokens) for name, values in columns.items()}


def _weigh_all(padded: TrainingBatch, columns: TurnColumns) -> TrainingBatch:
    """Return the batch with weights for all response tokens, since those without loss need values and rewards too."""
    weights = torch.zeros_like(padded.tokens["loss_weights"])
    weights[~padded.is_padding_row] = columns.join("loss_weights", np.ones(columns.num_tokens, np.float32))
    return padded.with_tokens(loss_weights=weights)


def _placed(values: NDArray[np.float32], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return float32 [A] with the values where the mask is true, and 0 elsewhere."""
    placed = np.zeros(len(mask), np.float32)
    placed[mask] = values
    return placed


def turns_with_prompts(groups: Sequence[Group], role: Role) -> list[Turn]:
    """Return the turns of all groups with the prompts of this role. Raises DataError for attempts of several turns."""
    turns: list[Turn] = []
    for group in groups:
        for attempt in group.trajectories:
            if role in group.prompts and len(attempt.turns) > 1:
                raise DataError(
                    f"Sample {attempt.sample} of prompt '{group.uid}' has {len(attempt.turns)} turns, but the prompt "
                    f"of the {role} is for one turn. Choose an environment with one turn, or remove the scorer."
                )
            turns += [
                with_fields(turn, prompt_ids=group.prompts.get(role, turn.prompt_ids), routed_experts=None)
                for turn in attempt.turns
            ]
    return turns


def _check_experts(batch: TrainingBatch, groups: Sequence[Group]) -> None:
    """Raise DataError if a turn lacks its experts. Otherwise, the models would silently choose other experts."""
    if bool(batch.is_padding_row.all()) or ROUTED_EXPERTS in batch.tokens:
        return
    attempts = trajectories_of(groups)
    lacking = [attempt for attempt in attempts if any(turn.routed_experts is None for turn in attempt.turns)]
    named = f"sample {lacking[0].sample} of prompt '{lacking[0].uid}'" if lacking else "the batch"
    raise DataError(
        f"source.router_replay is true, but {named} has turns without recorded experts. Set router_replay: false, or "
        "use an engine that records experts. A recording must also have been made with router_replay: true."
    )


def _check_support(batch: TrainingBatch) -> None:
    """Raise DataError if a token with loss is not among the tokens that top_p and top_k kept."""
    support, trained = batch.tokens.get(SUPPORT), batch.tokens["loss_weights"] != 0
    tokens = batch.tokens["input_ids"][trained].unsqueeze(1)
    if support is None or not bool((support[trained] == tokens).any(1).all()):
        raise DataError(
            "source.sampling.top_k is set, but rollouts do not record among which tokens each token was sampled. The "
            "engine must return `GenerationResult.support`. A recording must have been made with the same `sampling`."
        )


def _join_carried(groups: Sequence[Group], names: Sequence[str], columns: TurnColumns) -> dict[str, Tensor]:
    """Return a column per name. Each response token gets the number from its prompt's row."""
    tokens = [int(group.flat.num_response.sum()) for group in groups]
    for group in groups:
        for name in names:
            if name not in group.columns:
                raise DataError(
                    f"The recorded group of prompt '{group.uid}' has no column '{name}' of source.carry. Record with "
                    "the same `carry`, or remove the name."
                )
    return {name: columns.join(name, np.repeat([group.columns[name] for group in groups], tokens)) for name in names}
