"""Generate groups as the scheduler allows, and keep the finished ones until a batch takes them.

Place on the way: prompts in draw order -> admission -> attempts -> finished groups -> Collected, one per batch.
Everything here runs on one event loop; the training thread calls in through `LoopThread`. Knows no model, backend or
batch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from spurline.errors import RunFailedError
from spurline.rl.draws import Draw, SkippedRow
from spurline.rl.group_runner import GivenUpPrompt, Outcome
from spurline.rl.prompt_source import Collected
from spurline.rl.trajectory import Group, has_equal_returns, turns_of
from spurline_async_rl.scheduling.ledger import Ledger, State
from spurline_async_rl.scheduling.scheduler import Scheduler
from spurline_async_rl.source.recordings import groups_of
from spurline_async_rl.source.staleness import version_range
from spurline_async_rl.timeline.recorder import Timeline


class GroupSource(Protocol):
    """Where groups come from: core's prompts and attempts."""

    def take(self, start: int, count: int) -> Sequence[Draw | SkippedRow]:
        """As of PromptDraws."""
        ...

    def skip(self, row: SkippedRow) -> None:
        """As of PromptDraws."""
        ...

    async def run(self, prompt: Draw) -> Outcome:
        """All attempts at a prompt."""
        ...

    def take_retries(self, uid: str) -> int:
        """Attempts at this prompt that were made again; told once."""
        ...


class Producer:
    """State between steps: scheduler, ledger, finished groups, and what the next batch has cost so far.

    leave_out_equal: groups whose returns are equal make way for further prompts.
    notify: called on the loop after everything that may let the training thread go on.
    """

    def __init__(
        self,
        source: GroupSource,
        scheduler: Scheduler,
        timeline: Timeline,
        *,
        leave_out_equal: bool,
        notify: Callable[[], None],
    ) -> None:
        self._source = source
        self.scheduler = scheduler
        self.ledger = Ledger()
        self._timeline = timeline
        self._leave_out_equal = leave_out_equal
        self._notify = notify
        self._again: deque[int] = deque()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, Group] = {}
        self._costs = {"quarantined": 0, "skipped": 0, "retries": 0}
        self._failure: BaseException | None = None
        self._stopped = True

    def start(self) -> None:
        """Begin to generate; called on the loop."""
        self._stopped = False
        self._admit()

    def publish(self, version: int) -> None:
        """All engines generate with these weights; more groups may start."""
        self.scheduler.publish(version)
        self._admit()

    def take(self, step: int) -> tuple[Collected, int] | None:
        """The groups of this step and the retries they took, or None while they are not there.

        Raises what ended generation, and RunFailedError when the step cannot be filled.
        """
        if self._failure is not None:
            raise self._failure
        if self.scheduler.next_batch() is None:
            if self.scheduler.is_exhausted():
                raise self._exhausted()
            return None
        left_out = set(self.scheduler.fillers)
        draws = self.scheduler.take()
        for draw in draws:
            self.ledger.train(draw, step)
        groups = [self._groups.pop(draw) for draw in draws]
        unused = [self._groups.pop(draw) for draw in left_out - set(draws)]
        every = sorted([*groups, *unused], key=lambda group: group.draw)
        collected = Collected(
            tuple(groups),
            tuple(every),
            self.ledger.num_drawn,
            self._costs["quarantined"],
            self._costs["skipped"],
            len(left_out & set(draws)),
        )
        retries = self._costs["retries"]
        self._costs = dict.fromkeys(self._costs, 0)
        self._timeline.taken(step, draws)
        self._check()
        self._admit()
        return collected, retries

    def num_resolved(self) -> int:
        """Prompts that are done with: trained on, filtered, given up or skipped."""
        counts = self.ledger.counts()
        return counts["trained"] + counts["filtered"] + counts["quarantined"] + counts["skipped"]

    async def close(self) -> None:
        """Cancel what is under way and wait for it; attempts end within a limit of their own."""
        self._stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def snapshot(self) -> tuple[dict[str, object], Sequence[Group]]:
        """State without the finished groups, and these, to be encoded elsewhere: that takes seconds for large ones, in
        which this loop would serve nobody. Groups under way will start again."""
        kept = [self._groups[draw] for draw in sorted(self._groups)]
        buffered = [group for group in self.scheduler.untrained if group.finished]
        state: dict[str, object] = {
            "ledger": self.ledger.state_dict(),
            "buffered": [[group.draw, group.version] for group in buffered],
            "fillers": [*self.scheduler.fillers],
            "left_out": self.scheduler.num_left_out,
            "costs": dict(self._costs),
        }
        return state, kept

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self._again = deque(self.ledger.in_state(State.PENDING))
        buffered = [(int(draw), int(version)) for draw, version in state["buffered"]]
        self.scheduler.restore(buffered, state["fillers"], state["left_out"], pending=self._again)
        self._costs = {name: int(count) for name, count in state["costs"].items()}
        self._groups = {group.draw: group for group in groups_of(state["groups"])}
        self._check()

    def _admit(self) -> None:
        try:
            while not self._stopped and self._failure is None and self.scheduler.may_admit():
                self._start_next()
        except Exception as error:  # noqa: BLE001 - raised where the next batch is taken
            self._fail(error)
        self._timeline.level(self.scheduler.num_running, self.scheduler.num_buffered)

    def _start_next(self) -> None:
        """Start the next prompt, first those that a checkpoint found under way; or leave its row out."""
        number = self._again.popleft() if self._again else self.ledger.draw()
        [draw] = self._source.take(number, 1)
        if isinstance(draw, SkippedRow):
            self.ledger.move(number, State.SKIPPED)
            self.scheduler.pass_over(number)
            self._costs["skipped"] += 1
            return
        self.scheduler.admit(number)
        self.ledger.move(number, State.RUNNING)
        self._timeline.group_began(number, self.scheduler.version)
        self._tasks[number] = asyncio.get_running_loop().create_task(self._run(draw), name=f"group {draw.uid}")

    async def _run(self, draw: Draw) -> None:
        try:
            outcome = await self._source.run(draw)
            self._end(draw, outcome)
        except Exception as error:  # noqa: BLE001 - raised where the next batch is taken
            self._fail(error)
        finally:
            del self._tasks[draw.number]
        self._admit()
        self._notify()

    def _end(self, draw: Draw, outcome: Outcome) -> None:
        number = draw.number
        self._costs["retries"] += self._source.take_retries(draw.uid)
        if isinstance(outcome, SkippedRow):
            self._source.skip(outcome)
            self._costs["skipped"] += 1
            self.scheduler.leave_out(number, counts=False)
            self._settle(number, State.SKIPPED, None)
        elif isinstance(outcome, GivenUpPrompt):
            self._costs["quarantined"] += 1
            self.scheduler.leave_out(number)
            self._settle(number, State.QUARANTINED, None)
        elif self._leave_out_equal and has_equal_returns(outcome):
            self.scheduler.leave_out(number, can_fill=True)
            self._settle(number, State.FILTERED, outcome)
        else:
            self.scheduler.finish(number)
            self._settle(number, State.BUFFERED, outcome)

    def _settle(self, number: int, state: State, group: Group | None) -> None:
        self.ledger.move(number, state)
        tokens, oldest, newest = 0, self.scheduler.version, self.scheduler.version
        if group is not None:
            self._groups[number] = group
            tokens = sum(len(turn.response_ids) for turn in turns_of([group]))
            oldest, newest = version_range(group)
        name = cast("Any", state.name.lower())
        self._timeline.group_ended(number, name, tokens=tokens, oldest=oldest, newest=newest)

    def _fail(self, error: BaseException) -> None:
        """Nothing further starts; the training thread gets the error with the next batch it asks for."""
        self._failure = self._failure or error
        self._notify()

    def _exhausted(self) -> RunFailedError:
        given_up, limit = self._costs["quarantined"], self.scheduler.limits.draw_limit
        usable = self.scheduler.num_buffered + len(self.scheduler.fillers)
        return RunFailedError(
            f"The step drew {usable + given_up} prompts and {given_up} of them were given up, so only {usable} of "
            f"{self.scheduler.limits.batch_size} groups are there. Correct what fails, or raise "
            f"source.max_draws_per_step, which is {limit}."
        )

    def _check(self) -> None:
        self.ledger.check(running=len(self._tasks), buffered=self.scheduler.num_buffered)
