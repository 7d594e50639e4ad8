"""Share the work of all sources of rollouts: prompts in order, attempts at them, and batches made of their groups.

Place on the way: draws -> attempts -> groups -> Preparation -> TrainingBatch. A source derives from `PromptSource` and
decides when groups are generated and which of them make a batch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.data.batch import TrainingBatch
from spurline.errors import DataError, RunFailedError, listing
from spurline.protocols.backend import Backend
from spurline.protocols.dataset import Longest
from spurline.protocols.held_out import HeldOutEvaluation
from spurline.protocols.source import BatchSource, FirstPrompt, SourceContext
from spurline.protocols.stateful import refuse_other_data
from spurline_rl.attempts import Attempts
from spurline_rl.configs import HeldOutConfig, PromptSourceConfig
from spurline_rl.draws import Draw, PromptDraws, SkippedRow
from spurline_rl.group_runner import GivenUpPrompt, Outcome, carried, reasons_of, tags_of
from spurline_rl.health import length_metrics, reward_metrics
from spurline_rl.held_out import OF_SOURCE, AttemptsEvaluation, open_held_out
from spurline_rl.kept_rollouts import ROLLOUTS_FOLDER
from spurline_rl.kept_rollouts.keeper import KeptStep, RolloutKeeper
from spurline_rl.preparation import Preparation
from spurline_rl.protocols.rollout_engine import RolloutEngine
from spurline_rl.trajectory import Group, has_equal_returns
from spurline_text.prompts import read_question
from spurline_text.rows.rows import explain_bad_row
from spurline_text.tokenization import plain_text_notes

RunGroups = Callable[[Sequence[Draw]], Awaitable[Sequence[Outcome]]]
FindPrompt = Callable[[Draw], Sequence[int] | None]
TakeDraws = Callable[[int, int], Sequence[Draw | SkippedRow]]

_ROWS_BEFORE_TRAINING = 1_000
"""Rows of each dataset that are looked at before a run; the others are checked when they are drawn."""
_SHOWN_CHARACTERS = 800


@dataclass(frozen=True)
class Collected:
    """The groups of a step, and what it took to get them.

    Attributes:
        groups: Exactly as many as asked for, in draw order.
        every: All groups that were scored, those filtered included.
        next_draw: The first prompt not drawn.
        given_up: Prompts given up.
        skipped: Draws of rows that cannot be used.
        refill_missing: Groups with equal rewards that are trained on, as the limit of draws was reached.
        lost: The prompts given up, as far as this process has seen them.
    """

    groups: tuple[Group, ...]
    every: tuple[Group, ...]
    next_draw: int
    given_up: int
    skipped: int
    refill_missing: int
    lost: tuple[GivenUpPrompt, ...] = ()


async def collect_groups(
    take: TakeDraws, run: RunGroups, *, first_draw: int, count: int, draw_limit: int, filters: bool
) -> Collected:
    """Draw until `count` groups can be trained on.

    Each round draws exactly the number still missing, so that the prompts of a step depend on the results alone and
    never on their order in time. Rows that cannot be used do not count against `draw_limit`: `take` raises DataError
    when no other row is left.

    Args:
        take: Returns draws by first number and count.
        run: Makes all attempts at prompts.
        first_draw: Number of the first draw.
        count: Groups to collect.
        draw_limit: Prompts that may be drawn. At the limit the earliest filtered groups are used after all, since a
            batch has a fixed number of prompts.
        filters: Filter groups whose returns are equal, and draw further prompts (dynamic sampling, DAPO, Yu et al.
            2025, arXiv:2503.14476).

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
            f"The step drew {len(every) + len(given_up)} prompts and {len(given_up)} of them were given up, so "
            f"only {len(every)} of {count} groups are there. Correct what fails, or raise "
            f"source.max_draws_per_step, which is {draw_limit}.{reasons_of(given_up)}"
        )
    groups = sorted([*kept, *filtered[:short]], key=lambda group: group.draw)
    return Collected(tuple(groups), tuple(every), next_draw, len(given_up), skipped, short, tuple(given_up))


class PromptSource(BatchSource):
    """Base of sources whose batches are groups of scored attempts."""

    generates_with_copies: bool = False
    records = (ROLLOUTS_FOLDER,)

    def __init__(self, config: PromptSourceConfig, context: SourceContext) -> None:
        run = context.config
        self._hooks = context.host.hooks
        per_step = config.prompts_per_step
        self._prompts = PromptDraws.open(run.data.train, context, order=run.data.order, per_step=per_step)
        self._held_out: PromptDraws | None = None
        if run.data.eval:
            self._held_out = open_held_out(run.data.eval, context)
        self._preparation = Preparation(config, context)
        self._settings = config
        self._context = context
        self._attempts = Attempts(config, context, self.check_engine)
        self._kept = RolloutKeeper(run.run_dir, context.tokenizer, config.keep_rollouts * 1_000_000)
        self.total_steps = run.total_steps(self._prompts.prompts_per_epoch, config.prompts_per_step)

    def check_engine(self, engine: RolloutEngine) -> None:
        """Raise ConfigError for an engine that cannot generate with this source's weights. Before anything starts."""

    def start(self, step: int, backend: Backend) -> None:
        self._backend = backend
        self._kept.start(step - 1)

    def summary(self) -> Mapping[str, object]:
        config, shows = self._settings, self._attempts.shows_prompts
        return {
            **self._prompts.summary(),
            # Another environment may make turns of any column itself.
            "notes": plain_text_notes(self._prompts.datasets, self._context.tokenizer) if shows else [],
            "samples_per_epoch": self._prompts.prompts_per_epoch,
            "samples_per_step": config.prompts_per_step,
            "step_of": f"{config.prompts_per_step} prompts x {config.samples_per_prompt} attempts",
            "objective": self._preparation.describe(),
        }

    def longest(self) -> Longest | None:
        return self._with_response(self._survey)

    def longest_held_out(self, prompts: PromptDraws) -> Longest | None:
        """Return the longest of these prompts with a whole response. Raises DataError for a row that cannot be used."""
        return self._with_response(self._survey_of(prompts, "rendering held-out prompts", self._attempts.first_prompt))

    def _with_response(self, seen: _Survey | None) -> Longest | None:
        if seen is None:
            return None
        tokens = seen.longest + self._settings.sampling.max_new_tokens
        return Longest(tokens, seen.where, "source.sampling.max_new_tokens", prompt_tokens=seen.longest)

    def preview(self) -> Sequence[str]:
        return () if self._survey is None else self._survey.lines(self._context.tokenizer)

    def first_prompts(self, count: int) -> Sequence[FirstPrompt]:
        return [self._first_prompt_of(draw) for draw in self._prompts.take(0, count)]

    def _first_prompt_of(self, draw: Draw | SkippedRow) -> FirstPrompt:
        if isinstance(draw, SkippedRow):
            return FirstPrompt(draw.uid, (), (f"left out: {draw.reason}",))
        environment = self._settings.environment
        notes = [f"from {draw.location}, for the environment '{environment.name}'"]
        if environment.tool_names:
            notes.append(f"tools: {listing(environment.tool_names)}")
        if environment.reward_terms:
            notes.append(f"rewards: {listing(environment.reward_terms)}")
        try:
            ids = self._attempts.first_prompt(draw)
        except DataError as error:
            if draw.dataset.on_bad_row == "error":
                raise explain_bad_row(draw.location, error) from error
            return FirstPrompt(draw.uid, (), (f"left out: {error}",))
        try:
            question = read_question(draw.row, draw.dataset)
        except DataError:
            notes.append("its columns are read by the environment alone")
        else:
            if question.reference is not None:
                notes.append(f"reference answer: {question.reference}")
        notes += [f"{name}: {value}" for name, value in tags_of(draw.row).items()]
        if ids is None:
            notes.append("the prompt is not known before the environment runs")
        return FirstPrompt(draw.uid, ids or (), tuple(notes))

    @cached_property
    def _survey(self) -> _Survey | None:
        def first_prompt(draw: Draw) -> Sequence[int] | None:
            for name in self._settings.carry:
                carried(draw, name)
            return self._attempts.first_prompt(draw)

        return self._survey_of(self._prompts, "rendering prompts", first_prompt)

    def _survey_of(self, prompts: PromptDraws, doing: str, first_prompt: FindPrompt) -> _Survey | None:
        self._context.progress(doing)
        return _survey(prompts.rows(self._context.row_limit or _ROWS_BEFORE_TRAINING), first_prompt)

    def evaluation(self) -> HeldOutEvaluation:
        assert self._held_out is not None, "there is no held-out data"
        return AttemptsEvaluation(
            self._settings.held_out, self._held_out, self, OF_SOURCE, self._settings.environment.reward_terms
        )

    def sample_keys(self) -> NDArray[np.uint64]:
        return self._prompts.keys()

    def given_up(self) -> Sequence[str]:
        return [prompt.reason for prompt in self._attempts.given_up.prompts]

    @abstractmethod
    def make_attempts(self, prompts: Sequence[Draw], held_out: HeldOutConfig) -> Sequence[Outcome]:
        """Make attempts at held-out prompts with the weights as they are, and wait for them."""

    def _batch(
        self, step: int, collected: Collected, backend: Backend, *, retries: int, seconds: float
    ) -> TrainingBatch:
        """Make the batch of a step from its groups.

        Args:
            retries: Attempts made again for them.
            seconds: Time spent on generating.
        """
        self._hooks.on_rollouts_scored(step=step, groups=collected.groups)
        batch = self._preparation.prepare(collected.groups, backend)
        self._prompts.observe(step, collected.every)
        metrics = {
            **_collection_metrics(collected, retries, seconds),
            **reward_metrics(collected.every),
            **length_metrics(collected.every),
        }
        if self._kept.is_on:
            self._keep(step, collected, batch)
        return replace(batch, info={**batch.info, **metrics})

    def _keep(self, step: int, collected: Collected, batch: TrainingBatch) -> None:
        """Hand the attempts over to be written. The columns it takes are not reused as buffers."""
        columns = self._preparation.turn_columns(batch, collected.groups)
        trained = {group.draw for group in collected.groups}
        filtered = [group for group in collected.every if group.draw not in trained]

        def split(name: str) -> list[NDArray[Any]]:
            return columns.split(batch.tokens[name])

        per_epoch = self._prompts.prompts_per_epoch
        self._kept.keep(KeptStep(step, collected.groups, filtered, collected.lost, per_epoch, split))

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
        """Restore it. Raises CheckpointError when the data is not that of the checkpoint."""
        refuse_other_data(
            state,
            self._prompts.fingerprint(),
            "The prompts are not those the checkpoint was trained on: a file changed. Restore it, or start again with "
            "another run_dir.",
        )
        given_up, prompts = state["quarantine"], state["prompts"]
        assert isinstance(given_up, Mapping), given_up
        assert isinstance(prompts, Mapping), prompts
        self._attempts.given_up.load_state_dict(given_up)
        self._prompts.load_state_dict(prompts)


@dataclass(frozen=True)
class _Survey:
    """The first prompts of some rows.

    Attributes:
        count: Prompts looked at.
        tokens: Tokens of all of them.
        longest, where: Tokens of the longest prompt, and its row.
        first, first_where: Token ids of the first prompt, and its row.
        left_out: Rows that `on_bad_row: skip` leaves out.
    """

    count: int
    tokens: int
    longest: int
    where: str
    first: Sequence[int]
    first_where: str
    left_out: int

    def lines(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the survey as text, with the first prompt as the model gets it."""
        left_out = f"; {self.left_out:,} rows will be left out" if self.left_out else ""
        shown = str(tokenizer.decode(list(self.first), skip_special_tokens=False))
        if len(shown) > _SHOWN_CHARACTERS:
            half = _SHOWN_CHARACTERS // 2
            shown = f"{shown[:half]} [... {len(shown) - 2 * half:,} characters ...] {shown[-half:]}"
        return [
            f"{self.count:,} looked at, {self.tokens / self.count:.0f} tokens on average, longest {self.longest:,} "
            f"({self.where}){left_out}",
            f"the first, as the model gets it ({self.first_where}, {len(self.first):,} tokens):",
            *(f"  | {line}" for line in shown.splitlines()),
        ]


def _survey(draws: Iterable[Draw | SkippedRow], first_prompt: FindPrompt) -> _Survey | None:
    """Survey first prompts; None if the environment does not know them beforehand. Raises DataError for a bad row."""
    count = tokens = longest = left_out = 0
    where = first_where = ""
    first: Sequence[int] = ()
    for draw in draws:
        if isinstance(draw, SkippedRow):
            left_out += 1
            continue
        try:
            ids = first_prompt(draw)
        except DataError as error:
            if draw.dataset.on_bad_row == "error":
                raise explain_bad_row(draw.location, error) from error
            left_out += 1
            continue
        if ids is None:
            return None
        if not count:
            first, first_where = ids, draw.location
        if len(ids) > longest:
            longest, where = len(ids), draw.location
        count, tokens = count + 1, tokens + len(ids)
    return _Survey(count, tokens, longest, where, first, first_where, left_out) if count else None


def _collection_metrics(collected: Collected, retries: int, seconds: float) -> dict[str, float]:
    tokens = sum(int(group.flat.num_response.sum()) for group in collected.every)
    return {
        "time/generate": seconds,
        "rollout/tokens": float(tokens),
        "groups/drawn": float(len(collected.every) + collected.given_up),
        "groups/filtered": float(len(collected.every) - len(collected.groups)),
        "groups/quarantined": float(collected.given_up),
        "groups/skipped_rows": float(collected.skipped),
        "groups/retries": float(retries),
        "groups/refill_missing": float(collected.refill_missing),
    }
