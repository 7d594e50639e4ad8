"""Run all attempts at a prompt: at the same time, within a time limit, again when they fail, until they are given up.

Place on the way: Draw -> n tasks -> environment -> scored trajectories -> Group, or GivenUpPrompt or SkippedRow with
the reason. It knows nothing of engines, batches or steps; `run_group` is what every source of rollouts builds on.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, replace
from typing import Any, TypeGuard, cast

import numpy as np

from spurline.errors import DataError, PluginError, RunFailedError, SpurlineError, listing, suggestion
from spurline.terminal import printable
from spurline_rl.chat_front import PrefixError
from spurline_rl.concurrency import all_or_none, located
from spurline_rl.draws import Draw, SkippedRow, row_of
from spurline_rl.limited_tasks import Job, LimitedTasks
from spurline_rl.protocols.environment import AttemptFailedError, Environment, PolicyHandle, Task
from spurline_rl.trajectory import Group, Trajectory
from spurline_text.rows.rows import explain_bad_row

_SHOWN_REASONS = 5
_LONGEST_TAG = 200
_MOST_TAGS = 32


@dataclass(frozen=True)
class GivenUpPrompt:
    """A prompt whose attempts could not be completed. draw, uid: as of Group. reason: where and why, for messages."""

    uid: str
    draw: int
    reason: str


Outcome = Group | GivenUpPrompt | SkippedRow
"""The fates of a drawn prompt."""


class GivenUpPrompts:
    """Counts the prompts that were given up; with its state in the checkpoint, over the whole run.

    Args:
        limit: How many the run may lose. A row that fails again in a later epoch is the same loss, counted once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_row: dict[str, GivenUpPrompt] = {}

    @property
    def prompts(self) -> tuple[GivenUpPrompt, ...]:
        """The first of each row, in the order in which they were given up."""
        return tuple(self._by_row.values())

    def add(self, prompt: GivenUpPrompt) -> None:
        """Count one more. Raises RunFailedError with the first reasons when that is one too many."""
        self._by_row.setdefault(row_of(prompt.uid), prompt)
        count = len(self._by_row)
        if count <= self._limit:
            return
        raise RunFailedError(
            f"{count} prompts had to be given up, over source.faults.max_quarantined: {self._limit}. "
            f"Correct what fails, or raise the limit.{reasons_of(self.prompts)}"
        )

    def state_dict(self) -> dict[str, object]:
        return {"groups": [asdict(prompt) for prompt in self.prompts]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        saved = [GivenUpPrompt(**fields) for fields in cast("list[dict[str, Any]]", state["groups"])]
        self._by_row = {}
        for prompt in saved:
            self._by_row.setdefault(row_of(prompt.uid), prompt)


def reasons_of(prompts: Sequence[GivenUpPrompt]) -> str:
    """Lines with the first reasons and how many more there are, to stand behind a message."""
    reasons = "".join(f"\n- {prompt.reason}" for prompt in prompts[:_SHOWN_REASONS])
    more = f"\n- and {len(prompts) - _SHOWN_REASONS} more" if len(prompts) > _SHOWN_REASONS else ""
    return f"{reasons}{more}"


class _GiveUp(Exception):  # noqa: N818 - how an attempt tells its group
    """An attempt failed for good; the text says where and why."""


@dataclass(eq=False)
class GroupRunner:
    """Runs groups on one event loop.

    DataError is about the row, which another attempt would meet again: `on_bad_row` says whether it ends the run or the
    row is skipped. Every other SpurlineError but AttemptFailedError ends the run, as it is about the configuration, a
    component or the engine. Whatever else an attempt raises, and its time-out, is retried with other seeds; then the
    prompt is given up with all its attempts: those that are left would be compared with a smaller group than others.
    After a PrefixError it is given up at once: that depends on what the model wrote as well as on the row.

    Attributes:
        make_policy: A handle for a task and the number of its earlier failures.
        score: Applied to every trajectory within its attempt, so that what it raises counts as a failure of the
            attempt.
        retries: Further attempts after a failure.
        max_concurrent: Attempts under way at the same time.
        seconds_down: As of `MayBeDown`.
        carry: Columns of the row that the group takes along.
    """

    environment: Environment
    make_policy: Callable[[Task, int], PolicyHandle]
    score: Callable[[Trajectory], Trajectory]
    given_up: GivenUpPrompts
    _: KW_ONLY
    samples_per_prompt: int
    retries: int
    attempt_timeout_s: InitVar[float]
    max_concurrent: InitVar[int]
    seconds_down: InitVar[Callable[[], float]] = lambda: 0.0
    carry: Sequence[str] = ()

    def __post_init__(self, attempt_timeout_s: float, max_concurrent: int, seconds_down: Callable[[], float]) -> None:
        self.tasks = LimitedTasks[Trajectory](
            max_concurrent, attempt_timeout_s, seconds_down, "source.faults.attempt_timeout_s"
        )
        self._retries_of: Counter[str] = Counter()
        self._has_told = False

    async def run_groups(self, prompts: Sequence[Draw]) -> list[Outcome]:
        """The outcome of each prompt, in order. After an error or a cancellation no attempt is left running."""
        return await all_or_none([self.run_group(prompt) for prompt in prompts], "work")

    async def run_group(self, prompt: Draw) -> Outcome:
        """All attempts at one prompt.

        Raises:
            RunFailedError: If it is given up beyond the run's limit.
            DataError: For a row that cannot be used unless `on_bad_row: skip`.
        """
        try:
            # Before the attempts: a row without the numbers must not cost a generation.
            columns = {name: carried(prompt, name) for name in self.carry}
            trajectories = await _GroupAttempts(self, prompt).run()
        except _GiveUp as failure:
            lost = GivenUpPrompt(prompt.uid, prompt.number, str(failure))
            self.given_up.add(lost)
            return lost
        except DataError as error:
            if prompt.dataset.on_bad_row == "error":
                raise
            return SkippedRow(prompt.uid, prompt.number, str(error))
        return Group(prompt.uid, prompt.number, tuple(trajectories), columns, tags_of(prompt.row))

    def take_retries(self, uid: str) -> int:
        """Attempts at this prompt that were made again; told once."""
        return self._retries_of.pop(uid, 0)

    def count_retry(self, task: Task, attempt: int, error: Exception) -> None:
        """An attempt at this task is made again. The first one is told on the terminal: where every attempt takes its
        whole time to fail, much time passes before a prompt is given up."""
        self._retries_of[task.uid] += 1
        if not self._has_told:
            self._has_told = True
            text = f"An attempt failed and is made again, as others will be: {_explain_failure(task, attempt, error)}"
            print(printable(text), file=sys.stderr, flush=True)

    async def attempt(self, task: Task, attempt: int) -> Trajectory:
        """One attempt, scored. Raises PluginError for an environment that does not keep its contract."""
        try:
            trajectory = await self.environment.run(task, self.make_policy(task, attempt))
        except SystemExit as error:
            # A failure of the attempt: asyncio would let it end the event loop, and with it every attempt, without a
            # word.
            raise AttemptFailedError(f"It raised {type(error).__name__}({error}).") from error
        self._check(trajectory, task)
        scored = self.score(trajectory)
        return replace(scored, retries=attempt) if attempt else scored

    def _check(self, trajectory: Any, task: Task) -> None:
        """Raise PluginError for an environment that does not keep its contract."""
        name = type(self.environment).__name__
        if not isinstance(trajectory, Trajectory):
            raise PluginError(f"{name}.run returned a {type(trajectory).__name__}, not a Trajectory.")
        if (trajectory.uid, trajectory.sample) != (task.uid, task.sample):
            raise PluginError(
                f"{name}.run was given {_name(task)} and returned sample {trajectory.sample} of prompt "
                f"{trajectory.uid}. Does it keep state between attempts?"
            )
        if not trajectory.turns:
            raise PluginError(f"{name}.run returned a trajectory without turns for {_name(task)}.")
        for number, turn in enumerate(trajectory.turns):
            for field in ("loss_mask", "logprobs", "versions", "rewards"):
                values = getattr(turn, field)
                if values is not None and len(values) != len(turn.response_ids):
                    raise PluginError(
                        f"{name}.run: turn {number} of {_name(task)} has {len(values)} {field} for "
                        f"{len(turn.response_ids)} response tokens."
                    )


class _GroupAttempts:
    """All attempts at one prompt: each again while it may be, and none left running when it is over."""

    __slots__ = ("_done", "_failed", "_jobs", "_missing", "_runner", "_trajectories")

    def __init__(self, runner: GroupRunner, prompt: Draw) -> None:
        self._runner = runner
        self._done = asyncio.get_running_loop().create_future()
        self._failed: tuple[_Attempt, BaseException] | None = None
        self._missing = runner.samples_per_prompt
        self._trajectories: list[Trajectory | None] = [None] * self._missing
        self._jobs = [_Attempt(self, _task_of(prompt, sample)) for sample in range(self._missing)]

    @property
    def is_over(self) -> bool:
        return self._done.done()

    @property
    def runner(self) -> GroupRunner:
        return self._runner

    async def run(self) -> list[Trajectory]:
        """A trajectory of each sample, in order.

        Raises _GiveUp after the last failure of one, DataError for a row that cannot be used, and what ends the run.
        """
        jobs, tasks = self._jobs, self._runner.tasks
        try:
            for job in jobs:
                tasks.submit(job)
            await self._done
        finally:
            # Nothing begins any more, also after a cancellation.
            self._done.cancel()
            await tasks.end(jobs)
            # Jobs and their group refer to each other; without them, both are freed at once.
            jobs.clear()
        failed, self._failed = self._failed, None
        if failed is None:
            return cast("list[Trajectory]", self._trajectories)
        # Put into words here and not in `ended`: what an environment raises may fail to say what it is.
        error = self._last_word(*failed)
        try:
            raise error
        finally:
            # They refer to this frame by their tracebacks.
            del error, failed

    def ended(self, job: _Attempt, trajectory: Trajectory | None, error: BaseException | None) -> None:
        """An attempt came to an end: note it, make it again, or end the group."""
        if self.is_over:
            return
        if error is None:
            self._trajectories[job.asked.sample] = trajectory
            self._missing -= 1
            if self._missing == 0:
                self._done.set_result(None)
        elif _may_succeed(error) and job.attempt < self._runner.retries:
            self._runner.count_retry(job.asked, job.attempt, error)
            job.attempt += 1
            self._runner.tasks.submit(job)
        else:
            self._failed = job, error
            self._done.set_result(None)

    def _last_word(self, job: _Attempt, error: BaseException) -> BaseException:
        """Return the error with which the group ends after this failure, one of those that `run` raises."""
        final: Exception
        if isinstance(error, DataError) and not isinstance(error, PrefixError):
            final = explain_bad_row(job.asked.location, error)
        elif isinstance(error, PrefixError) or _may_succeed(error):
            final = _GiveUp(_explain_failure(job.asked, job.attempt, error))
        else:
            return error
        final.__cause__ = error
        return final


class _Attempt(Job[Trajectory]):
    """One attempt of a group. asked: the task it is given. attempt: earlier failures."""

    __slots__ = ("_group", "asked", "attempt")

    def __init__(self, group: _GroupAttempts, asked: Task) -> None:
        super().__init__()
        self._group = group
        self.asked = asked
        self.attempt = 0

    @property
    def is_wanted(self) -> bool:
        return not self._group.is_over

    @property
    def what(self) -> str:
        return f"{type(self._group.runner.environment).__name__}.run for {_name(self.asked)}"

    def run(self) -> Coroutine[Any, Any, Trajectory]:
        return self._group.runner.attempt(self.asked, self.attempt)

    def ended(self, result: Trajectory | None, error: BaseException | None) -> None:
        self._group.ended(self, result, error)


def _may_succeed(error: BaseException) -> TypeGuard[Exception]:
    """Return whether another attempt may succeed: the error is not about the row, the configuration, a component or
    the engine."""
    is_ours = isinstance(error, SpurlineError) and not isinstance(error, AttemptFailedError)
    return isinstance(error, Exception) and not is_ours


def _task_of(prompt: Draw, sample: int) -> Task:
    return Task(prompt.row, prompt.dataset, prompt.uid, sample, prompt.location)


def tags_of(row: Mapping[str, Any]) -> dict[str, str | float]:
    """The values of a row that are finite numbers or short texts, such as an answer or a level."""
    found: dict[str, str | float] = {}
    for name, value in row.items():
        plain = value.item() if isinstance(value, np.generic) else value
        # What a column of a table lacks is often NaN.
        is_number = isinstance(plain, int) or (isinstance(plain, float) and math.isfinite(plain))
        if is_number or (isinstance(plain, str) and len(plain) <= _LONGEST_TAG):
            found[name] = plain
            if len(found) == _MOST_TAGS:
                break
    return found


def carried(prompt: Draw, name: str) -> float:
    """The number in this column of the prompt's row. Raises DataError when there is none."""
    value = prompt.row.get(name)
    # bool is an int; numpy's numbers come from Arrow tables.
    if isinstance(value, (int, float, np.number, np.bool_)) and math.isfinite(value):
        return float(value)
    there = (
        f"holds {value!r}, which is no finite number"
        if name in prompt.row
        else f"is missing.{suggestion(name, prompt.row)} Columns: {listing(prompt.row)}"
    )
    raise DataError(
        f"{prompt.location}: the column '{name}', which source.carry takes along, {there}. Mend the row, or leave such "
        "rows out with `on_bad_row: skip`."
    )


def _name(task: Task) -> str:
    return f"sample {task.sample} of prompt {task.uid}"


def _explain_failure(task: Task, attempt: int, error: Exception) -> str:
    """Which attempt failed, and how; for an unexpected error also where in the code."""
    tries = f", after {attempt + 1} attempts" if attempt else ""
    text = str(error) if isinstance(error, SpurlineError) else located(error)
    return f"{task.location} ({_name(task)}{tries}): {text}"
