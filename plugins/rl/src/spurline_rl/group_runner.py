"""Run all attempts at a prompt at the same time, with a time limit and retries.

Data flow: Draw -> n tasks -> environment -> scored trajectories -> Group, or GivenUpPrompt or SkippedRow with
the reason. Every source of rollouts uses `GroupRunner.run_group`.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, asdict, dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np

from spurline.errors import DataError, PluginError, RunFailedError, SpurlineError, listing, suggestion
from spurline.terminal import tell
from spurline_concurrency.calls import Call, Places, TimeLimit, all_or_none, located
from spurline_rl.chat_front import PrefixError
from spurline_rl.draws import Draw, SkippedRow, row_of
from spurline_rl.protocols.environment import AttemptFailedError, ChoosesByRow, Environment, PolicyHandle, Task
from spurline_rl.protocols.scorer import Scorer
from spurline_rl.trajectory import Group, Trajectory, with_fields
from spurline_text.rows.rows import explain_bad_row

_SHOWN_REASONS = 5
_LONGEST_TAG = 200
_MOST_TAGS = 32


@dataclass(frozen=True)
class GivenUpPrompt:
    """A prompt that was given up because all retries of an attempt failed. `reason` says where and why."""

    uid: str
    draw: int
    reason: str
    environment: str = ""
    """See `Trajectory.environment`."""


Outcome = Group | GivenUpPrompt | SkippedRow
"""The result of a drawn prompt."""


class GivenUpPrompts:
    """Counts the prompts that were given up in the whole run. Checkpoints keep the count.

    Args:
        limit: Number of prompts that the run may give up. A row that fails again in a later epoch counts once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_row: dict[str, GivenUpPrompt] = {}

    @property
    def prompts(self) -> tuple[GivenUpPrompt, ...]:
        """Return the first given-up prompt of each row, in the order in which they were given up."""
        return tuple(self._by_row.values())

    def add(self, prompt: GivenUpPrompt) -> None:
        """Count a prompt. If there are now more than the limit, raises RunFailedError with the first reasons."""
        self._by_row.setdefault(row_of(prompt.uid), prompt)
        if len(self._by_row) > self._limit:
            raise RunFailedError(
                f"{len(self._by_row)} prompts had to be given up, more than source.faults.max_quarantined: "
                f"{self._limit}. Correct what fails, or raise the limit.{reasons_of(self.prompts)}"
            )

    def state_dict(self) -> dict[str, object]:
        return {"groups": [asdict(prompt) for prompt in self.prompts]}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        saved = [GivenUpPrompt(**fields) for fields in cast("list[dict[str, Any]]", state["groups"])]
        self._by_row = {row_of(prompt.uid): prompt for prompt in saved}


def reasons_of(prompts: Sequence[GivenUpPrompt]) -> str:
    """Return lines to append to a message: the first reasons that differ, and the number of further prompts."""
    # The texts of equal reasons differ in the place before them.
    texts = [prompt.reason for prompt in prompts]
    first = {text.partition("): ")[2] or text: number for number, text in reversed([*enumerate(texts)])}
    shown = [texts[number] for number in sorted(first.values())[:_SHOWN_REASONS]]
    reasons = "".join(f"\n- {text}" for text in shown)
    more = f"\n- and {len(prompts) - len(shown)} more" if len(prompts) > len(shown) else ""
    return f"{reasons}{more}"


class _GiveUp(Exception):  # noqa: N818 - it ends the group and not the run
    """An attempt failed for the last time. The text says where and why."""


@dataclass(eq=False)
class GroupRunner:
    """Runs groups of attempts on one event loop.

    After a DataError no attempt at the row can succeed. `on_bad_row` says whether the run ends or the row is skipped.
    After a time-out, an AttemptFailedError, or an exception that is not a SpurlineError, the attempt is repeated with
    other seeds. If the last retry fails, the prompt and all its attempts are given up, since groups must be complete.
    After a PrefixError the prompt is given up at once. Any other SpurlineError ends the run.

    Attributes:
        make_policy: Returns the handle for an attempt, given the task and the number of its failed attempts.
        score: Scores a trajectory. An error that it raises counts as a failure of the attempt.
        retries: Largest number of further attempts after an attempt fails.
        max_concurrent: Largest number of attempts that run at the same time.
        seconds_down: See `TakesWeights`.
        carry: Columns of the row whose numbers are copied into the group.
        scorers: What the finished group goes through, in order.
        recalled: Scored attempts by the uid of their prompt, which are used instead of making attempts.
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
    scorers: Sequence[Scorer] = ()

    def __post_init__(self, attempt_timeout_s: float, max_concurrent: int, seconds_down: Callable[[], float]) -> None:
        self._places = Places(max_concurrent, attempt_timeout_s, seconds_down, "source.faults.attempt_timeout_s")
        self.recalled: Mapping[str, tuple[Trajectory, ...] | GivenUpPrompt] = {}
        self._retries_of: Counter[str] = Counter()
        self._has_told = False

    async def run_groups(self, prompts: Sequence[Draw]) -> list[Outcome]:
        """Return the outcome of each prompt, in order. After an error or a cancellation no attempt is left running."""
        return await all_or_none([self.run_group(prompt) for prompt in prompts], "work")

    async def run_group(self, prompt: Draw) -> Outcome:
        """Make all attempts at one prompt.

        Raises:
            RunFailedError: If the prompt is given up, and the run has now given up more prompts than it may.
            DataError: For a row that cannot be used, unless `on_bad_row: skip`.
        """
        recalled = self.recalled.get(prompt.uid)
        if isinstance(recalled, GivenUpPrompt):
            self.given_up.add(recalled)
            return recalled
        tasks = [prompt.task(sample) for sample in range(self.samples_per_prompt)]
        label, limit = "", None
        try:
            # Read the columns first, so that nothing is generated for a row without them.
            columns = {name: carried(prompt, name) for name in self.carry}
            if isinstance(self.environment, ChoosesByRow):
                label = self.environment.label_of(tasks[0])
                limit = self.environment.time_limit_of(label)
            what = f"{type(self.environment).__name__}.run for prompt {prompt.uid}"
            if recalled is None:
                trajectories = await self._attempt_all(tasks, what, label, limit)
            else:
                trajectories = recalled
                self._retries_of[prompt.uid] = sum(attempt.retries for attempt in recalled)
            group = Group(prompt.uid, prompt.number, tuple(trajectories), columns, tags_of(prompt.row))
            for scorer in self.scorers:
                group = await _scored(scorer, group, prompt)
        except _GiveUp as failure:
            lost = GivenUpPrompt(prompt.uid, prompt.number, str(failure), label)
            self.given_up.add(lost)
            return lost
        except DataError as error:
            if prompt.dataset.on_bad_row == "error":
                raise
            return SkippedRow(prompt.uid, prompt.number, str(error))
        return group

    def take_retries(self, uid: str) -> int:
        """Return how many attempts at this prompt were retries, and forget the number."""
        return self._retries_of.pop(uid, 0)

    async def _attempt_all(
        self, tasks: Sequence[Task], what: str, label: str, limit: TimeLimit | None
    ) -> list[Trajectory]:
        """Return the trajectory of the first successful attempt at each task. `what` names the tasks in errors."""
        calls: list[Call[Trajectory]] = []
        num_failed = [0] * len(tasks)
        # One event for all attempts takes less of the controller's time than a future for each.
        num_open, is_over = len(tasks), asyncio.Event()

        def repeated(call: Call[Trajectory], error: BaseException) -> bool:
            number = calls.index(call)
            call.error = self._last_error(tasks[number], num_failed[number], error)
            if call.error is not None:
                return False
            num_failed[number] += 1
            work = partial(self._attempt, tasks[number], num_failed[number], label)
            calls[number] = self._places.start(call.what, work, call.on_end, limit)
            return True

        def on_end(call: Call[Trajectory]) -> None:
            nonlocal num_open
            try:
                if call.error is not None and repeated(call, call.error):
                    return
            except BaseException as error:  # noqa: BLE001 - without a caller, it would leave the group waiting
                call.error = error
            num_open -= 1
            if call.error is not None or not num_open:
                is_over.set()

        try:
            for task in tasks:
                name = f"{type(self.environment).__name__}.run for {_name(task)}"
                calls.append(self._places.start(name, partial(self._attempt, task, 0, label), on_end, limit))
            await is_over.wait()
            for call in calls:
                if call.error is not None:
                    raise call.error
            return [call.result() for call in calls]
        finally:
            await self._places.end(calls, what)
            # The traceback of an error refers to this frame, and the frame would keep the results alive.
            calls.clear()

    def _last_error(self, task: Task, attempt: int, error: BaseException) -> BaseException | None:
        """Return the error with which a failed attempt ends its group, or None if it is made again with other seeds."""
        if isinstance(error, DataError) and not isinstance(error, PrefixError):
            last: BaseException = explain_bad_row(task.location, error)
        elif not isinstance(error, Exception) or (
            isinstance(error, SpurlineError) and not isinstance(error, (AttemptFailedError, PrefixError))
        ):
            return error
        elif isinstance(error, PrefixError) or attempt == self.retries:
            last = _GiveUp(_explain_failure(task, attempt, error))
        else:
            self._count_retry(task, attempt, error)
            return None
        last.__cause__ = error
        return last

    def _count_retry(self, task: Task, attempt: int, error: Exception) -> None:
        """Count a retry. Print the reason of the run's first retry, since a prompt may be given up only much later."""
        self._retries_of[task.uid] += 1
        if not self._has_told:
            self._has_told = True
            reason = _explain_failure(task, attempt, error)
            tell(f"An attempt failed and is tried again. Later failures are not shown. {reason}")

    async def _attempt(self, task: Task, attempt: int, label: str) -> Trajectory:
        """Make one attempt, label it and score it. Raises PluginError if the environment breaks its contract."""
        try:
            trajectory = await self.environment.run(task, self.make_policy(task, attempt))
        except SystemExit as error:
            # In asyncio, SystemExit would end the event loop and all attempts without a message.
            raise AttemptFailedError(f"It raised {type(error).__name__}({error}).") from error
        self._check(trajectory, task, label)
        if label:
            trajectory = with_fields(trajectory, info={**trajectory.info, "environment": label})
        scored = self.score(trajectory)
        return replace(scored, retries=attempt) if attempt else scored

    def _check(self, trajectory: Any, task: Task, label: str) -> None:
        name = type(self.environment).__name__ + (f" '{label}'" if label else "")
        if not isinstance(trajectory, Trajectory):
            raise PluginError(
                f"{name}.run returned a {type(trajectory).__name__}, not a Trajectory, for {_name(task)}. Return the "
                "result of `policy.finish`."
            )
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


async def _scored(scorer: Scorer, group: Group, prompt: Draw) -> Group:
    name = f"{type(scorer).__name__}.score for prompt {prompt.uid}"
    try:
        scored = await scorer.score(group, prompt)
    except AttemptFailedError as error:
        raise _GiveUp(f"{prompt.location} ({name}): {error}") from error
    tokens = int(group.flat.num_response.sum())
    for column, values in scored.token_columns.items():
        if len(values) != tokens:
            raise PluginError(f"{name}: '{column}' has {len(values)} values for {tokens} response tokens.")
    return scored


def tags_of(row: Mapping[str, Any]) -> dict[str, str | float]:
    """Return the finite numbers and short texts of a row, such as an answer or a level."""
    found: dict[str, str | float] = {}
    for name, value in row.items():
        plain = value.item() if isinstance(value, np.generic) else value
        # Missing values of a table are often NaN.
        is_number = isinstance(plain, int) or (isinstance(plain, float) and math.isfinite(plain))
        if is_number or (isinstance(plain, str) and len(plain) <= _LONGEST_TAG):
            found[name] = plain
            if len(found) == _MOST_TAGS:
                break
    return found


def carried(prompt: Draw, name: str) -> float:
    """Return the number in this column of the prompt's row. Raises DataError if there is none."""
    value = prompt.row.get(name)
    # bool is an int; numpy's numbers come from Arrow tables.
    if isinstance(value, (int, float, np.number, np.bool_)) and math.isfinite(value):
        return float(value)
    there = (
        f"holds {value!r}, not a finite number"
        if name in prompt.row
        else f"is missing.{suggestion(name, prompt.row)} Columns: {listing(prompt.row)}"
    )
    raise DataError(
        f"{prompt.location}: the column '{name}' of source.carry {there}. Correct the row, or leave such rows out "
        "with `on_bad_row: skip`."
    )


def _name(task: Task) -> str:
    return f"sample {task.sample} of prompt {task.uid}"


def _explain_failure(task: Task, attempt: int, error: Exception) -> str:
    """Return which attempt failed and why. For an unexpected error this includes the line of code."""
    tries = f", after {attempt + 1} attempts" if attempt else ""
    text = str(error) if isinstance(error, SpurlineError) else located(error)
    return f"{task.location} ({_name(task)}{tries}): {text}"
