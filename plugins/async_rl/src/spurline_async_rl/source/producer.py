"""Generate groups as the scheduler allows, and keep finished groups until a batch takes them.

Everything here runs on one event loop. The training thread calls it through `LoopThread`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np

from spurline.errors import RunFailedError
from spurline_async_rl.scheduling.scheduler import Scheduler, State
from spurline_async_rl.source.recordings import groups_of
from spurline_async_rl.source.staleness import version_range
from spurline_async_rl.timeline.records import STATE_NAMES, Timeline
from spurline_rl.draws import Draw, PromptDraws, SkippedRow
from spurline_rl.group_runner import GivenUpPrompt, GroupRunner, Outcome, reasons_of
from spurline_rl.prompt_source import Collected
from spurline_rl.trajectory import Group, has_equal_returns, turns_of

_ADMITTED_AT_ONCE = 32
"""Groups that start without a break for other work on the loop. A publish may let thousands of attempts start."""


class Producer:
    """Generates groups on an event loop, and keeps the finished groups.

    Attributes:
        began_at: The time at which each running group began, by uid, on the monotonic clock.

    Args:
        filters: Whether groups with equal returns are filtered and replaced.
        notify: Called on the loop after each event for which the training thread may wait.
        ready: Prepares each finished group, on another thread.
    """

    def __init__(
        self,
        prompts: PromptDraws,
        runner: GroupRunner,
        scheduler: Scheduler,
        timeline: Timeline,
        *,
        filters: bool,
        notify: Callable[[], None],
        ready: Callable[[Group], Group] = lambda group: group,
    ) -> None:
        self.scheduler = scheduler
        self.began_at: dict[str, float] = {}
        self._prompts = prompts
        self._runner = runner
        self._timeline = timeline
        self._filters = filters
        self._notify = notify
        self._ready = ready
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="spurline-groups")
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, Group] = {}
        # Since when training lacks groups, and the seconds for which it lacked groups before, for the next batch.
        self._lacking_since: float | None = None
        self._lacked_s = 0.0
        # Counts and given-up prompts since the last batch.
        self._costs = {"skipped": 0, "retries": 0}
        self._given_up: list[GivenUpPrompt] = []
        self._failure: BaseException | None = None
        # For each distrusted engine: pairs (a, b). Its tokens of versions above a and below b are not trusted.
        self._distrusted: dict[str, list[tuple[int, float]]] = {}
        self._given_back = 0
        self._stopped = True
        self._goes_on_admitting = False

    def start(self) -> None:
        self._stopped = False
        self._admit()

    def publish(self, version: int) -> None:
        """Note that all engines generate with weights of this version, and start more groups."""
        self.scheduler.publish(version)
        self._admit()

    def take(self, step: int, seconds: float = 0.0, unproven: int | None = None) -> tuple[Collected, int] | None:
        """Return the groups of this step and the number of their retries, or None if the groups are not ready.

        Args:
            step: The 1-based step.
            seconds: Seconds since the previous step's groups were taken.
            unproven: Groups with tokens of this version or a newer one are not ready.

        Raises:
            RunFailedError: If the step cannot be filled. If generation has failed, its error is raised instead.
        """
        scheduler = self.scheduler
        if self._failure is not None:
            raise self._failure
        assert scheduler.taken == step - 1, f"step {step}: {scheduler}"
        assert scheduler.num_running == len(self._tasks), f"{len(self._tasks)} tasks: {scheduler}"
        ready = scheduler.next_batch()
        if ready is None and scheduler.is_exhausted():
            raise self._exhausted()
        now = time.monotonic()
        if ready is None:
            self._lacking_since = self._lacking_since or now
            scheduler.await_batch()
            self._admit()
            return None
        # A wait for a proof is no lack of groups: with a larger depth it would be as long.
        self._lacked_s += 0.0 if self._lacking_since is None else now - self._lacking_since
        self._lacking_since = None
        filtered = {*scheduler.filtered}
        if unproven is not None and any(
            version_range(self._groups[draw])[1] >= unproven for draw in filtered | {*ready}
        ):
            return None
        draws = scheduler.take(self._lacked_s, seconds)
        self._lacked_s = 0.0
        groups = tuple(self._groups[draw] for draw in draws)
        every = tuple(self._groups.pop(draw) for draw in sorted(filtered | {*draws}))
        costs, self._costs = self._costs, dict.fromkeys(self._costs, 0)
        lost, self._given_up = tuple(self._given_up), []
        filled_up = len(filtered & {*draws})
        collected = Collected(groups, every, scheduler.num_drawn, lost, costs["skipped"], filled_up)
        self._timeline.taken(step, draws)
        self._admit()
        return collected, costs["retries"]

    def distrust(self, engine: str, version: int) -> None:
        """Repeat all groups with tokens that this engine has generated with weights newer than this version.

        Running groups are checked when they end.
        """
        self._distrusted.setdefault(engine, []).append((version, math.inf))
        tainted = [draw for draw, group in self._groups.items() if self._is_tainted(group)]
        for draw in tainted:
            del self._groups[draw]
            if draw in self.scheduler.filtered:
                self.scheduler.discard_filtered(draw)
            else:
                self.scheduler.give_back(draw)
        self._given_back += len(tainted)
        self._admit()

    def trust(self, engine: str, version: int) -> None:
        """Trust again the tokens that a distrusted engine generates with weights of this version or newer ones."""
        if engine in self._distrusted:
            self._distrusted[engine] = [(above, min(below, version)) for above, below in self._distrusted[engine]]

    def take_given_back(self) -> int:
        """Return how many groups were given back since the last call."""
        count, self._given_back = self._given_back, 0
        return count

    def _is_tainted(self, group: Group) -> bool:
        if not self._distrusted:
            return False
        # Only the last engine of a response can have unproven tokens in it: the pool has cut those of earlier engines.
        finished = [(turn.engines[-1], np.asarray(turn.versions)) for turn in turns_of([group]) if turn.engines]
        return any(
            ((above < versions) & (versions < below)).any()
            for engine, versions in finished
            for above, below in self._distrusted.get(engine, ())
        )

    def tainted(self, outcomes: Sequence[Outcome]) -> list[int]:
        """Return the indices of the groups with tokens that are not trusted."""
        return [index for index, each in enumerate(outcomes) if isinstance(each, Group) and self._is_tainted(each)]

    async def close(self) -> None:
        """Cancel all running groups, and wait until they end. Attempts have their own time limit for this."""
        self._stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Preparing the current group takes only milliseconds.
        self._worker.shutdown(cancel_futures=True)

    def snapshot(self) -> tuple[dict[str, object], Sequence[Group]]:
        """Return the state and, separately, the finished groups, because encoding the groups takes long."""
        kept = [self._groups[draw] for draw in sorted(self._groups)]
        given_up = [asdict(prompt) for prompt in self._given_up]
        return {**self.scheduler.state_dict(), "costs": dict(self._costs), "given_up": given_up}, kept

    def load_state_dict(self, state: Mapping[str, Any], *, keep_groups: bool = True) -> None:
        """Restore a state. Without `keep_groups`, finished groups are generated again."""
        self.scheduler.load_state_dict(state, keep_groups=keep_groups)
        costs = {name: int(count) for name, count in state["costs"].items()}
        # Earlier checkpoints have only the number of the prompts that were given up.
        unnamed = [asdict(GivenUpPrompt("", -1, "before a resume"))] * costs.pop("quarantined", 0)
        self._costs, self._given_up = costs, [GivenUpPrompt(**prompt) for prompt in state.get("given_up", unnamed)]
        groups = groups_of(state["groups"]) if keep_groups else ()
        self._groups = {group.draw: self._ready(group) for group in groups}

    def _admit(self) -> None:
        """Start all groups that may start. If there are many, let the loop do other work in between."""
        try:
            for _ in range(_ADMITTED_AT_ONCE):
                if self._stopped or self._failure is not None or not self.scheduler.may_admit():
                    break
                self._start_next()
            else:
                if not self._goes_on_admitting:
                    self._goes_on_admitting = True
                    asyncio.get_running_loop().call_soon(self._go_on_admitting)
        except Exception as error:  # noqa: BLE001 - raised where the next batch is taken
            self._fail(error)

    def _go_on_admitting(self) -> None:
        self._goes_on_admitting = False
        self._admit()

    def _start_next(self) -> None:
        number = self.scheduler.draw()
        [draw] = self._prompts.take(number, 1)
        if isinstance(draw, SkippedRow):
            self.scheduler.skip(number)
            self._costs["skipped"] += 1
            return
        self.scheduler.admit(number)
        self._timeline.group_began(number, self.scheduler.version)
        self._tasks[number] = asyncio.get_running_loop().create_task(self._run(draw), name=f"group {draw.uid}")

    async def _run(self, draw: Draw) -> None:
        self.began_at[draw.uid] = time.monotonic()
        try:
            outcome = await self._runner.run_group(draw)
            if isinstance(outcome, Group):
                outcome = await asyncio.get_running_loop().run_in_executor(self._worker, self._ready, outcome)
            self._end(draw, outcome)
        except Exception as error:  # noqa: BLE001 - raised where the next batch is taken
            self._fail(error)
        finally:
            del self._tasks[draw.number], self.began_at[draw.uid]
        self._admit()
        self._notify()

    def _end(self, draw: Draw, outcome: Outcome) -> None:
        self._costs["retries"] += self._runner.take_retries(draw.uid)
        tokens, oldest, newest = 0, self.scheduler.version, self.scheduler.version
        engines: tuple[str, ...] = ()
        if isinstance(outcome, SkippedRow):
            self._prompts.skip(outcome)
            self._costs["skipped"] += 1
            state = State.SKIPPED
        elif isinstance(outcome, GivenUpPrompt):
            self._given_up.append(outcome)
            state = State.GIVEN_UP
        elif self._is_tainted(outcome):
            self._given_back += 1
            state = State.PENDING
        else:
            self._groups[draw.number] = outcome
            tokens = int(outcome.flat.num_response.sum())
            oldest, newest = version_range(outcome)
            engines = tuple(dict.fromkeys(name for turn in turns_of([outcome]) for name in turn.engines))
            state = State.FILTERED if self._filters and has_equal_returns(outcome) else State.BUFFERED
        if state is State.PENDING:
            self.scheduler.give_back(draw.number)
        else:
            self.scheduler.end(draw.number, state)
        self._timeline.group_ended(
            draw.number, STATE_NAMES[state], tokens=tokens, oldest=oldest, newest=newest, engines=engines
        )

    def _fail(self, error: BaseException) -> None:
        """Start no more groups. `take` raises this error in the training thread."""
        self._failure = self._failure or error
        self._notify()

    def _exhausted(self) -> RunFailedError:
        given_up, limits = len(self._given_up), self.scheduler.limits
        usable = self.scheduler.num_buffered + len(self.scheduler.filtered)
        return RunFailedError(
            f"The step drew {usable + given_up} prompts and {given_up} of them were given up, so there are only "
            f"{usable} of {limits.batch_size} groups. Correct the cause, or raise source.max_draws_per_step, which is "
            f"{limits.draw_limit}.{reasons_of(self._given_up)}"
        )
