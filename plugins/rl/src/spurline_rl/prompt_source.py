"""Share the work of all sources of rollouts: prompts in order, attempts at them, and batches made of their groups.

Place on the way: draws -> attempts -> groups -> Preparation -> TrainingBatch. A source derives from `PromptSource` and
says when groups are generated and which of them make a batch; nothing here generates by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline.errors import DataError, RunFailedError, listing
from spurline.protocols.backend import Backend
from spurline.protocols.held_out import HeldOutEvaluation
from spurline.protocols.lengths import Longest
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
from spurline_rl.prompt_survey import ROWS_BEFORE_TRAINING, PromptSurvey, survey
from spurline_rl.protocols.rollout_engine import RolloutEngine
from spurline_rl.trajectory import Group, has_equal_returns
from spurline_text.prompts import read_question
from spurline_text.rows.rows import explain_bad_row
from spurline_text.tokenization import plain_text_notes

RunGroups = Callable[[Sequence[Draw]], Awaitable[Sequence[Outcome]]]
FindPrompt = Callable[[Draw], Sequence[int] | None]
TakeDraws = Callable[[int, int], Sequence[Draw | SkippedRow]]


@dataclass(frozen=True)
class Collected:
    """groups: exactly as many as asked for, in draw order. next_draw: the first prompt not drawn.

    Attributes:
        every: All groups that were scored, those filtered included.
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

    Each round draws exactly the number still missing, so which prompts a step takes depends on the results alone, never
    on which of them came first. filters: groups whose returns are equal are filtered, and further prompts drawn
    (dynamic sampling, DAPO, Yu et al. 2025, arXiv:2503.14476); once `draw_limit` prompts are drawn, the earliest of
    them are used after all, since a batch has a fixed number of prompts. Rows that cannot be used are no part of that
    limit: `take` raises DataError when nothing but such rows is left.

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
        config = self._settings
        return {
            **self._prompts.summary(),
            "notes": self._notes(),
            "samples_per_epoch": self._prompts.prompts_per_epoch,
            "samples_per_step": config.prompts_per_step,
            "step_of": f"{config.prompts_per_step} prompts x {config.samples_per_prompt} attempts",
            "objective": self._preparation.describe(),
        }

    def _notes(self) -> list[str]:
        # Another environment may make turns of any column itself.
        shows = self._attempts.shows_prompts
        return plain_text_notes(self._prompts.datasets, self._context.tokenizer) if shows else []

    def longest(self) -> Longest | None:
        return self._with_response(self._survey)

    def longest_held_out(self, prompts: PromptDraws) -> Longest | None:
        """Return the longest of these prompts with a whole response, as `longest` does. Raises DataError."""
        return self._with_response(self._survey_of(prompts, "rendering held-out prompts", self._attempts.first_prompt))

    def _with_response(self, seen: PromptSurvey | None) -> Longest | None:
        if seen is None:
            return None
        tokens = seen.longest + self._settings.sampling.max_new_tokens
        return Longest(tokens, seen.where, "source.sampling.max_new_tokens", prompt_tokens=seen.longest)

    def preview(self) -> Sequence[str]:
        return () if self._survey is None else self._survey.lines(self._context.tokenizer)

    def first_prompts(self, count: int) -> Sequence[FirstPrompt]:
        return [self._shown(draw) for draw in self._prompts.take(0, count)]

    def _shown(self, draw: Draw | SkippedRow) -> FirstPrompt:
        """A prompt with what it is answered and scored with."""
        if isinstance(draw, SkippedRow):
            return FirstPrompt(draw.uid, (), (f"left out: {draw.reason}",))
        environment, tokenizer = self._settings.environment, self._context.tokenizer
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
            question = read_question(draw.row, draw.dataset, has_chat_template=tokenizer.chat_template is not None)
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
    def _survey(self) -> PromptSurvey | None:
        return self._survey_of(self._prompts, "rendering prompts", self._first_prompt)

    def _survey_of(self, prompts: PromptDraws, doing: str, first_prompt: FindPrompt) -> PromptSurvey | None:
        limit = self._context.row_limit or ROWS_BEFORE_TRAINING
        self._context.progress(doing)
        return survey(prompts.rows(limit), first_prompt)

    def _first_prompt(self, draw: Draw) -> Sequence[int] | None:
        """Return the first prompt of a row that is trained on. Raises DataError if the row lacks a carried column."""
        for name in self._settings.carry:
            carried(draw, name)
        return self._attempts.first_prompt(draw)

    def evaluation(self) -> HeldOutEvaluation:
        """Attempts at the held-out prompts with the weights as they are."""
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
        """The batch of a step from its groups. retries: attempts made again for them. seconds: spent on generating."""
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
        """Hand the attempts over to be written. The columns it takes are no buffers that are used again."""
        columns = self._preparation.turn_columns(batch, collected.groups)
        trained = {group.draw for group in collected.groups}
        filtered = [group for group in collected.every if group.draw not in trained]
        taken = KeptStep(
            step,
            collected.groups,
            filtered,
            collected.lost,
            self._prompts.prompts_per_epoch,
            lambda name: columns.split(batch.tokens[name]),
        )
        self._kept.keep(taken)

    def flush(self) -> None:
        self._kept.flush()

    def close(self) -> None:
        self._kept.close()

    def _prompts_state(self) -> dict[str, object]:
        """Return the state of the prompts and of those given up, for a checkpoint."""
        return {
            "data": self._prompts.fingerprint(),
            "prompts": self._prompts.state_dict(),
            "quarantine": self._attempts.given_up.state_dict(),
        }

    def _load_prompts_state(self, state: Mapping[str, object]) -> None:
        """Raises CheckpointError when the data is not what the checkpoint was trained on."""
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


def _collection_metrics(collected: Collected, retries: int, seconds: float) -> dict[str, float]:
    """Return metrics of the cost of generating and of the fate of the prompts that were drawn."""
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
