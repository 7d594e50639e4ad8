"""Do the work that all sources of rollouts share: draw prompts, make attempts, and make batches of groups.

Data flow: draws -> attempts -> groups -> Preparation -> TrainingBatch. A source derives from `PromptSource`. It
decides when groups are generated, and which groups make a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.data.batch import TrainingBatch
from spurline.errors import ConfigError, DataError, RunFailedError, listing
from spurline.protocols.backend import Backend
from spurline.protocols.dataset import Longest
from spurline.protocols.held_out import HeldOutEvaluation
from spurline.protocols.source import BatchSource, FirstPrompt, SourceContext
from spurline.protocols.stateful import refuse_other_data
from spurline_rl.attempts import Attempts
from spurline_rl.configs import PromptSourceConfig
from spurline_rl.draws import Draw, PromptDraws, SkippedRow
from spurline_rl.evaluation_configs import HeldOutConfig, success_problems
from spurline_rl.group_runner import GivenUpPrompt, Outcome, carried, reasons_of, tags_of
from spurline_rl.held_out import OF_SOURCE, AttemptsEvaluation, open_held_out
from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER, KeptRollouts
from spurline_rl.kept_rollouts.keeper import RolloutKeeper
from spurline_rl.kept_rollouts.table import KeptStep
from spurline_rl.metrics import (
    environment_metrics,
    length_metrics,
    metrics_by_environment,
    reward_metrics,
    support_metrics,
)
from spurline_rl.preparation import Preparation, TurnColumns
from spurline_rl.protocols.environment import Environment
from spurline_rl.protocols.rollout_engine import RolloutEngine
from spurline_rl.trajectory import Group, has_equal_returns
from spurline_text.prompts import read_question
from spurline_text.rows.rows import explain_bad_row
from spurline_text.tokenization import plain_text_notes

_ROWS_BEFORE_TRAINING = 1_000
"""Number of rows of each dataset that are checked before a run. The others are checked when they are drawn."""
_SHOWN_CHARACTERS = 800


@dataclass(frozen=True)
class Collected:
    """The groups of a step, and counts of the other draws.

    Attributes:
        groups: The groups to train on, in draw order.
        every: All groups that were scored, including filtered ones.
        next_draw: Number of the next prompt to draw.
        given_up: The prompts that were given up.
        skipped: Number of drawn rows that cannot be used.
        refill_missing: Number of filtered groups that are trained on, because the limit of draws was reached.
    """

    groups: tuple[Group, ...]
    every: tuple[Group, ...]
    next_draw: int
    given_up: tuple[GivenUpPrompt, ...] = ()
    skipped: int = 0
    refill_missing: int = 0


async def collect_groups(
    take: Callable[[int, int], Sequence[Draw | SkippedRow]],
    run: Callable[[Sequence[Draw]], Awaitable[Sequence[Outcome]]],
    *,
    first_draw: int,
    count: int,
    draw_limit: int,
    filters: bool,
) -> Collected:
    """Draw until `count` groups can be trained on.

    Each round draws as many prompts as groups are missing, so the prompts of a step never depend on which attempts end
    first. Unusable rows do not count against `draw_limit`. If all rows are unusable, `take` raises DataError.

    Args:
        take: Returns draws, given the number of the first one and a count.
        run: Makes all attempts at prompts.
        draw_limit: Number of prompts that may be drawn. At the limit the earliest filtered groups are used, since a
            batch has a fixed number of prompts.
        filters: Whether to filter (leave out) groups with equal returns, and draw other prompts (dynamic sampling of
            DAPO, Yu et al. 2025, arXiv:2503.14476).

    Raises:
        RunFailedError: If so many prompts were given up that `count` cannot be reached.
    """
    kept: list[Group] = []
    filtered: list[Group] = []
    given_up: list[GivenUpPrompt] = []
    skipped = 0
    next_draw = first_draw
    while len(kept) < count:
        tried = len(kept) + len(filtered) + len(given_up)
        missing = min(count - len(kept), draw_limit - tried)
        if missing == 0:
            break
        taken = take(next_draw, missing)
        next_draw += missing
        draws = [draw for draw in taken if isinstance(draw, Draw)]
        skipped += missing - len(draws)
        for outcome in await run(draws):
            if isinstance(outcome, SkippedRow):
                skipped += 1
            elif isinstance(outcome, GivenUpPrompt):
                given_up.append(outcome)
            elif filters and has_equal_returns(outcome):
                filtered.append(outcome)
            else:
                kept.append(outcome)
    short = count - len(kept)
    every = sorted([*kept, *filtered], key=lambda group: group.draw)
    if short > len(filtered):
        raise RunFailedError(
            f"The step drew {len(every) + len(given_up)} prompts, and {len(given_up)} of them were given up, so it has "
            f"only {len(every)} of {count} groups. Correct what fails, or raise source.max_draws_per_step: "
            f"{draw_limit}.{reasons_of(given_up)}"
        )
    groups = sorted([*kept, *filtered[:short]], key=lambda group: group.draw)
    return Collected(tuple(groups), tuple(every), next_draw, tuple(given_up), skipped, short)


class PromptSource(BatchSource):
    """Base of sources whose batches are groups of scored attempts.

    Attributes:
        generates_with_copies: Whether the engines have their own copies of the weights. If so, an evaluation that puts
            other parameters into the backend does not change what the engines generate.
    """

    generates_with_copies: bool = False
    records = (ROLLOUTS_FOLDER,)

    def __init__(self, config: PromptSourceConfig, context: SourceContext) -> None:
        run = context.config
        self._hooks = context.host.hooks
        per_step = config.prompts_per_step
        self._prompts = PromptDraws.open(run.data.train, context, order=run.data.order, per_step=per_step)
        self._held_out = open_held_out(run.data.eval, context) if run.data.eval else None
        self._preparation = Preparation(config, context)
        self._settings = config
        self._context = context
        self._attempts = Attempts(config, context, self.check_engine)
        self._kept = RolloutKeeper(run.run_dir, context.tokenizer, config.keep_rollouts * 1_000_000)
        self.total_steps = run.total_steps(self._prompts.prompts_per_epoch, config.prompts_per_step)

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise ConfigError for an engine that cannot use the weights of this run."""

    def start(self, step: int, backend: Backend) -> None:
        self._backend = backend
        self._kept.start(step - 1)

    def recall(self, run_dir: Path | None, step: int) -> int:
        """Train in a step on the attempts that a run has kept for it, and make only those that it has not kept.

        This has no effect with `router_replay`, `sampling.top_k` or rewards of a model, since such attempts are not
        kept whole. It is called before the source starts, or before `after_update` of the step before.

        Args:
            run_dir: A run that began the step with the same weights and settings, or None to make all attempts.

        Returns:
            The number of prompts whose attempts are used.

        Raises:
            RunDirectoryError: If the kept attempts cannot be read.
        """
        settings = self._settings
        # Rewards of models would be added once more.
        is_whole = not (settings.router_replay or settings.sampling.top_k or settings.environment.model_rewards)
        found = KeptRollouts(run_dir).outcomes(step) if run_dir and is_whole else {}
        self._attempts.training.recalled = found
        return len(found)

    def summary(self) -> Mapping[str, object]:
        config, facts = self._settings, self._prompts.summary()
        # An environment that does not show its prompts may use any column of a row.
        first = [draw for draw in self._prompts.rows(1) if isinstance(draw, Draw)]
        shown = [draw.dataset for draw in first if self._read_prompt(draw) is not None]
        datasets = [each for each in self._prompts.datasets if any(each.config is config for config in shown)]
        return {
            **facts,
            "notes": [*facts["notes"], *plain_text_notes(datasets, self._context.tokenizer), *self._attempts.notes],
            "samples_per_epoch": self._prompts.prompts_per_epoch,
            "samples_per_step": config.prompts_per_step,
            "step_of": f"{config.prompts_per_step} prompts x {config.samples_per_prompt} attempts",
            "objective": self._preparation.describe(),
        }

    def longest(self) -> Longest | None:
        return self._with_response(self._survey)

    def longest_held_out(self, prompts: PromptDraws) -> Longest | None:
        """Return the longest of these prompts, with a full response. A bad row is skipped or raises DataError."""
        return self._with_response(self._survey_of(prompts, "rendering held-out prompts"))

    def _with_response(self, seen: _Survey | None) -> Longest | None:
        if seen is None:
            return None
        where, ids = seen.longest
        tokens = len(ids) + self._settings.sampling.max_new_tokens
        return Longest(tokens, where, "source.sampling.max_new_tokens", prompt_tokens=len(ids))

    def preview(self) -> Sequence[str]:
        return () if self._survey is None else self._survey.lines(self._context.tokenizer)

    def first_prompts(self, count: int) -> Sequence[FirstPrompt]:
        return [self._first_prompt_of(draw) for draw in self._prompts.take(0, count)]

    def _first_prompt_of(self, draw: Draw | SkippedRow) -> FirstPrompt:
        if isinstance(draw, Draw):
            ids = self._read_prompt(draw)
            if not isinstance(ids, SkippedRow):
                return FirstPrompt(draw.uid, ids or (), tuple(self._notes_on(draw, is_known=ids is not None)))
            draw = ids
        return FirstPrompt(draw.uid, (), (f"left out: {draw.reason}",))

    def _notes_on(self, draw: Draw, *, is_known: bool) -> list[str]:
        environment = self._settings.environment.part(label := self._attempts.label_of(draw))
        notes = [f"from {draw.location}, for the environment '{label or environment.name}'"]
        if environment.tool_names:
            notes.append(f"tools: {listing(environment.tool_names)}")
        if environment.reward_terms:
            notes.append(f"rewards: {listing(environment.reward_terms)}")
        try:
            question = read_question(draw.row, draw.dataset)
        except DataError:
            notes.append("only the environment reads its columns")
        else:
            if question.reference is not None:
                notes.append(f"reference answer: {question.reference}")
        notes += [f"{name}: {value}" for name, value in tags_of(draw.row).items()]
        if not is_known:
            notes.append("the prompt is not known before the environment runs")
        return notes

    @cached_property
    def _survey(self) -> _Survey | None:
        return self._survey_of(self._prompts, "rendering prompts", self._settings.carry)

    def _survey_of(self, prompts: PromptDraws, doing: str, carry: Sequence[str] = ()) -> _Survey | None:
        """Read the prompts of the first rows. Returns None if no row is usable, or prompts are not known beforehand."""
        self._context.progress(doing)
        self._attempts.check_labels(prompts)
        found: list[tuple[str, Sequence[int]]] = []
        left_out = 0
        for draw in prompts.rows(self._context.row_limit or _ROWS_BEFORE_TRAINING):
            ids = self._read_prompt(draw, carry) if isinstance(draw, Draw) else draw
            if not isinstance(draw, Draw) or isinstance(ids, SkippedRow):
                left_out += 1
            elif ids is not None:
                found.append((draw.location, ids))
        return _Survey(found, left_out) if found else None

    def _read_prompt(self, draw: Draw, carry: Sequence[str] = ()) -> Sequence[int] | SkippedRow | None:
        """Return a row's first prompt, and check the columns `carry`. A bad row is skipped or raises DataError."""
        try:
            for name in carry:
                carried(draw, name)
            return self._attempts.first_prompt(draw)
        except DataError as error:
            explained = explain_bad_row(draw.location, error)
            if draw.dataset.on_bad_row == "error":
                raise explained from error
            return SkippedRow(draw.uid, draw.number, str(explained))

    def evaluation(self) -> HeldOutEvaluation:
        assert self._held_out is not None, "there is no held-out data"
        config, environment = self._settings.held_out, self._settings.environment
        terms, labels = environment.reward_terms, environment.by_label.keys()
        declared = self._attempts.declared_terms if config.success.reward is None else None
        if problems := [*success_problems(config.success, declared, f"{OF_SOURCE}success")]:
            raise ConfigError(problems)
        return AttemptsEvaluation(config, self._held_out, self, OF_SOURCE, terms, labels)

    def sample_keys(self) -> NDArray[np.uint64]:
        return self._prompts.keys()

    def given_up(self) -> Sequence[str]:
        return [prompt.reason for prompt in self._attempts.given_up.prompts]

    @abstractmethod
    def make_attempts(
        self, prompts: Sequence[Draw], held_out: HeldOutConfig, environment: Environment | None = None
    ) -> Sequence[Outcome]:
        """Make attempts at held-out prompts with the current weights."""

    def _batch(
        self, step: int, collected: Collected, backend: Backend, *, retries: int, seconds: float
    ) -> tuple[TrainingBatch, TurnColumns]:
        """Make the batch of a step from its groups, with the positions of their turns.

        Generating the groups took `retries` retries and `seconds` seconds.
        """
        if self._settings.environment.model_rewards:
            every = {group.draw: group for group in self.with_model_rewards(collected.every, backend)}
            groups = tuple(every[group.draw] for group in collected.groups)
            collected = replace(collected, groups=groups, every=tuple(every.values()))
        self._hooks.on_rollouts_scored(step=step, groups=collected.groups)
        batch = self._preparation.prepare(collected.groups, backend)
        self._prompts.observe(step, collected.every)
        every = collected.every
        metrics = {
            "time/generate": seconds,
            "rollout/tokens": float(sum(int(group.flat.num_response.sum()) for group in every)),
            "groups/drawn": float(len(every) + len(collected.given_up)),
            "groups/filtered": float(len(every) - len(collected.groups)),
            "groups/quarantined": float(len(collected.given_up)),
            "groups/skipped_rows": float(collected.skipped),
            "groups/retries": float(retries),
            "groups/refill_missing": float(collected.refill_missing),
            **self._prompts.metrics(),
            **reward_metrics(every),
            **length_metrics(every),
            **support_metrics(every),
            **environment_metrics(every),
            **metrics_by_environment(every, collected.groups, [lost.environment for lost in collected.given_up]),
        }
        if self._settings.equal_returns_teach(self._context.config):
            # A report would advise to change the task, but these groups teach too.
            metrics = {name: value for name, value in metrics.items() if not name.endswith("/zero_variance")}
        columns = self._preparation.turn_columns(batch, collected.groups)
        if self._kept.is_on:
            self._keep(step, collected, batch, columns)
        return replace(batch, info={**batch.info, **metrics}), columns

    def _keep(self, step: int, collected: Collected, batch: TrainingBatch, columns: TurnColumns) -> None:
        tokens = batch.tokens
        trained = {group.draw for group in collected.groups}
        filtered = [group for group in collected.every if group.draw not in trained]
        per_epoch, flatten = self._prompts.prompts_per_epoch, lambda name: columns.flatten(tokens[name])
        self._kept.keep(KeptStep(step, collected.groups, filtered, collected.given_up, per_epoch, flatten))

    def with_model_rewards(self, groups: Sequence[Group], backend: Backend) -> Sequence[Group]:
        """See `MakesAttempts`."""
        return self._preparation.with_model_rewards(groups, backend)

    def flush(self) -> None:
        self._kept.flush()

    def close(self) -> None:
        self._kept.close()

    def _prompts_state(self) -> dict[str, object]:
        return {
            "data": self._prompts.fingerprint(),
            "prompts": self._prompts.state_dict(),
            "quarantine": self._attempts.given_up.state_dict(),
        }

    def _load_prompts_state(self, state: Mapping[str, object]) -> None:
        """Restore the state. Raises CheckpointError if the data has changed."""
        refuse_other_data(
            state,
            self._prompts.fingerprint(),
            "A file of prompts has changed since the checkpoint. Restore it, or start again with another run_dir.",
        )
        self._attempts.given_up.load_state_dict(cast("Mapping[str, object]", state["quarantine"]))
        self._prompts.load_state_dict(cast("Mapping[str, object]", state["prompts"]))


@dataclass(frozen=True)
class _Survey:
    """The first prompts of some rows, as pairs of location and token ids, and the number of rows left out."""

    prompts: Sequence[tuple[str, Sequence[int]]]
    left_out: int

    @property
    def longest(self) -> tuple[str, Sequence[int]]:
        return max(self.prompts, key=lambda prompt: len(prompt[1]))

    def lines(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Describe the prompts, and show the first one as the model gets it."""
        left_out = f"; {self.left_out:,} rows will be left out" if self.left_out else ""
        first_where, first = self.prompts[0]
        shown = str(tokenizer.decode(list(first), skip_special_tokens=False))
        if len(shown) > _SHOWN_CHARACTERS:
            half = _SHOWN_CHARACTERS // 2
            shown = f"{shown[:half]} [... {len(shown) - 2 * half:,} characters ...] {shown[-half:]}"
        average = sum(len(ids) for _, ids in self.prompts) / len(self.prompts)
        where, longest = self.longest
        return [
            f"{len(self.prompts):,} checked, {average:.0f} tokens on average, longest {len(longest):,} ({where})"
            f"{left_out}",
            f"the first prompt, as the model gets it ({first_where}, {len(first):,} tokens):",
            *(f"  | {line}" for line in shown.splitlines()),
        ]
