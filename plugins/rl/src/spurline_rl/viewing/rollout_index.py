"""What rollouts are searched by: numbers of all attempts in columns, and their texts, a step at a time.

A step of the file is unpacked once, and again only when an attempt is looked at. What a live run adds is found by
`update`; a step that a resumed run made anew takes the place of the one before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spurline.errors import RunDirectoryError
from spurline_rl.kept_rollouts import ROLLOUTS_FILE, KeptAttempt, KeptRollouts, LostPrompt
from spurline_rl.kept_rollouts.members import members_of

SortKey = Literal["step", "reward", "tokens", "max_age", "max_gap"]
UNKNOWN_AGE = -1
"""`max_age` of attempts whose versions are not told."""

_PREVIEW = 200
"""Characters of a prompt and of a response that a list shows."""
_MOST_GIVEN_UP = 200
"""Prompts given up that an answer holds."""
_OPENED_STEPS = 4
"""Steps whose attempts stay unpacked, for the next look at one of them."""


@dataclass(frozen=True)
class RolloutFilter:
    """Which attempts are asked for; None and "" ask for all. Ends of ranges are included, texts ignore case.

    prompt: in the uid or the text of the prompt. tag: `name=value` with the whole value, or a part of either.
    text: in a response. min_age, min_gap: of the oldest token, and of the largest gap between the logprobs.
    """

    min_step: int | None = None
    max_step: int | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    min_age: int | None = None
    min_gap: float | None = None
    status: str = ""
    prompt: str = ""
    tag: str = ""
    text: str = ""


@dataclass(frozen=True)
class FoundAttempts:
    """A page of those that were asked for. matching: all of them. attempts: rows of the list, as JSON values."""

    matching: int
    attempts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class FoundPrompts:
    """Prompts that were given up. matching: all of them. prompts: the newest, as JSON values."""

    matching: int
    prompts: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class IndexState:
    """How far the index is. error: why the file cannot be read, or None."""

    indexed_steps: int
    steps: int
    attempts: int
    error: str | None


class RolloutIndex:
    """The attempts in a run's `rollouts.jsonl.gz`. Safe to use from several threads."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._path = run_dir / ROLLOUTS_FILE
        self._lock = Lock()
        self._stat: tuple[int, ...] | None = None
        self._wanted: dict[int, int] = {}
        self._steps: dict[int, _StepColumns] = {}
        self._joined: _Columns | None = None
        self._error: str | None = None
        self._opened: dict[tuple[int, int], list[KeptAttempt]] = {}

    def update(self, budget_s: float | None = None) -> IndexState:
        """Look what the file has, and read steps that are not in the index, the newest first, at least one.

        budget_s: seconds after which no other step is begun; None for all. A file that cannot be read is told in
        `error`; what was read of it before stays.
        """
        with self._lock:
            deadline = None if budget_s is None else time.monotonic() + budget_s
            try:
                self._look()
                rollouts: KeptRollouts | None = None
                for step, size in sorted(self._wanted.items(), reverse=True):
                    if step in self._steps:
                        continue
                    rollouts = rollouts or KeptRollouts(self._run_dir)
                    self._steps[step] = _StepColumns.of(size, *rollouts.attempts_and_given_up(step))
                    self._joined = None
                    if deadline is not None and time.monotonic() > deadline:
                        break
                self._error = None
            except (RunDirectoryError, OSError) as error:
                # A run that goes on may have put a shorter file in its place meanwhile: the next call looks anew.
                self._error, self._stat = str(error), None
            attempts = sum(len(columns.reward) for columns in self._steps.values())
            return IndexState(len(self._steps), len(self._wanted), attempts, self._error)

    def find(
        self,
        wanted: RolloutFilter,
        *,
        sort: SortKey = "step",
        ascending: bool = False,
        offset: int = 0,
        limit: int = 50,
    ) -> FoundAttempts:
        """Attempts in the index that pass the filter, `limit` of them from `offset` on; equal ones newest first."""
        with self._lock:
            columns = self._columns()
        found = columns.matching(wanted)
        keys = getattr(columns, sort)[found]
        order = np.lexsort((columns.place[found], -columns.step[found], keys if ascending else -keys))
        page = found[order[offset : offset + limit]]
        return FoundAttempts(len(found), [columns.row(number) for number in page.tolist()])

    def given_up(self, wanted: RolloutFilter) -> FoundPrompts:
        """Prompts that were given up in the steps of the index, the newest first, by step and uid of the filter."""
        first, last = wanted.min_step or 0, math.inf if wanted.max_step is None else wanted.max_step
        with self._lock:
            found = [
                prompt
                for step in sorted(self._steps, reverse=True)
                if first <= step <= last
                for prompt in self._steps[step].given_up
                if wanted.prompt.lower() in prompt.uid.lower()
            ]
        return FoundPrompts(len(found), [asdict(prompt) for prompt in found[:_MOST_GIVEN_UP]])

    def attempt(self, step: int, place: int) -> KeptAttempt | None:
        """The attempt at this place of a step, as rows tell both; None where there is none (any more).

        Raises RunDirectoryError for a file that something else has changed.
        """
        with self._lock:
            self._look()
            size = self._wanted.get(step)
            if size is None:
                return None
            attempts = self._opened.get((step, size))
            if attempts is None:
                try:
                    attempts = list(KeptRollouts(self._run_dir).attempts([step]))
                except OSError as error:
                    raise RunDirectoryError(f"{self._path}: cannot be read: {error.strerror or error}.") from error
                while len(self._opened) >= _OPENED_STEPS:
                    del self._opened[next(iter(self._opened))]
                self._opened[step, size] = attempts
            return attempts[place] if 0 <= place < len(attempts) else None

    def _look(self) -> None:
        """Which steps there are; those that are gone or were made anew leave the index."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            found: tuple[int, ...] | None = None
        except OSError as error:
            raise RunDirectoryError(f"{self._path}: cannot be read: {error.strerror or error}.") from error
        else:
            found = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if found is not None and found == self._stat:
            return
        self._wanted = {member.step: member.size for member in members_of(self._path)}
        self._stat = found
        for step in [step for step, columns in self._steps.items() if self._wanted.get(step) != columns.size]:
            del self._steps[step]
            self._joined = None

    def _columns(self) -> _Columns:
        if self._joined is None:
            self._joined = _Columns([self._steps[step] for step in sorted(self._steps)])
        return self._joined


@dataclass(frozen=True, eq=False)
class _StepColumns:
    """A step in the index. size: bytes that it has of the file, which tells it from one that was made anew.

    Arrays have an entry per attempt. prompt_of: the place of its prompt in `prompts`, which has the uid, the text and
    the tags of each, all in lower case. texts: responses in lower case. rows: what a list shows.
    """

    size: int
    step: NDArray[np.int32]
    place: NDArray[np.int32]
    reward: NDArray[np.float64]
    tokens: NDArray[np.int32]
    max_age: NDArray[np.int32]
    max_gap: NDArray[np.float32]
    trained: NDArray[np.bool_]
    prompt_of: NDArray[np.int32]
    prompts: Sequence[_Prompt]
    texts: Sequence[str]
    rows: Sequence[Mapping[str, Any]]
    given_up: Sequence[LostPrompt]

    @classmethod
    def of(cls, size: int, attempts: Sequence[KeptAttempt], given_up: Sequence[LostPrompt]) -> _StepColumns:
        prompts: dict[str, int] = {}
        found: list[_Prompt] = []
        texts: list[str] = []
        rows: list[Mapping[str, Any]] = []
        ages = np.full(len(attempts), UNKNOWN_AGE, np.int32)
        gaps = np.zeros(len(attempts), np.float32)
        for place, attempt in enumerate(attempts):
            if attempt.uid not in prompts:
                prompts[attempt.uid] = len(found)
                found.append(_Prompt.of(attempt))
            for turn in attempt.turns:
                age, gap = turn.ages, turn.gap
                if age is not None and len(age):
                    ages[place] = max(ages[place], int(age.max()))
                if gap is not None and len(gap):
                    # `fmax` passes over what is no number.
                    gaps[place] = np.fmax(gaps[place], np.fmax.reduce(np.abs(gap.astype(np.float32))))
            responses = [turn.response_text for turn in attempt.turns]
            texts.append("\n".join(responses).lower())
            rows.append(
                {
                    "step": attempt.step,
                    "place": place,
                    "status": attempt.status,
                    "uid": attempt.uid,
                    "sample": attempt.sample,
                    "reward": attempt.reward,
                    "advantage": attempt.advantage,
                    "tokens": attempt.num_response_tokens,
                    "turns": len(attempt.turns),
                    "finish": attempt.finish_reason,
                    "max_age": None if ages[place] == UNKNOWN_AGE else int(ages[place]),
                    "max_gap": float(gaps[place]),
                    "prompt": attempt.turns[0].prompt_text[:_PREVIEW] if attempt.turns else "",
                    "preview": (responses[-1] if responses else "")[:_PREVIEW],
                }
            )
        return cls(
            size=size,
            step=np.array([attempt.step for attempt in attempts], np.int32),
            place=np.arange(len(attempts), dtype=np.int32),
            reward=np.array([attempt.reward for attempt in attempts], np.float64),
            tokens=np.array([attempt.num_response_tokens for attempt in attempts], np.int32),
            max_age=ages,
            max_gap=gaps,
            trained=np.array([attempt.status == "trained" for attempt in attempts], np.bool_),
            prompt_of=np.array([prompts[attempt.uid] for attempt in attempts], np.int32),
            prompts=found,
            texts=texts,
            rows=rows,
            given_up=given_up,
        )


@dataclass(frozen=True)
class _Prompt:
    """What a prompt is searched by, in lower case. tags: `name=value` of each tag and column."""

    uid: str
    text: str
    tags: Sequence[str]

    @classmethod
    def of(cls, attempt: KeptAttempt) -> _Prompt:
        values = {**attempt.columns, **attempt.tags}
        text = attempt.turns[0].prompt_text if attempt.turns else ""
        return cls(attempt.uid.lower(), text.lower(), [f"{name}={value}".lower() for name, value in values.items()])

    def has_tag(self, wanted: str) -> bool:
        return any(tag == wanted if "=" in wanted else wanted in tag for tag in self.tags)


class _Columns:
    """All steps of the index, one after another."""

    def __init__(self, steps: Sequence[_StepColumns]) -> None:
        def joined(name: str, dtype: Any) -> NDArray[Any]:
            return np.concatenate([np.empty(0, dtype), *(getattr(step, name) for step in steps)])

        self.step: NDArray[np.int32] = joined("step", np.int32)
        self.place: NDArray[np.int32] = joined("place", np.int32)
        self.reward: NDArray[np.float64] = joined("reward", np.float64)
        self.tokens: NDArray[np.int32] = joined("tokens", np.int32)
        self.max_age: NDArray[np.int32] = joined("max_age", np.int32)
        self.max_gap: NDArray[np.float32] = joined("max_gap", np.float32)
        self._trained: NDArray[np.bool_] = joined("trained", np.bool_)
        self._prompts = [prompt for step in steps for prompt in step.prompts]
        firsts = np.cumsum([0, *(len(step.prompts) for step in steps)])
        shifted = [step.prompt_of + first for step, first in zip(steps, firsts, strict=False)]
        self._prompt_of: NDArray[np.int64] = np.concatenate([np.empty(0, np.int64), *shifted])
        self._texts = [text for step in steps for text in step.texts]
        self._rows = [row for step in steps for row in step.rows]

    def row(self, number: int) -> Mapping[str, Any]:
        return self._rows[number]

    def matching(self, wanted: RolloutFilter) -> NDArray[np.int64]:
        """Numbers of the attempts that pass, int64, ascending. Texts are read last, of what is left by then."""
        passes = np.ones(len(self.step), np.bool_)
        lowest = (
            (self.step, wanted.min_step),
            (self.reward, wanted.min_reward),
            (self.max_age, wanted.min_age),
            (self.max_gap, wanted.min_gap),
        )
        for column, bound in lowest:
            if bound is not None:
                passes &= column >= bound
        for column, bound in ((self.step, wanted.max_step), (self.reward, wanted.max_reward)):
            if bound is not None:
                passes &= column <= bound
        if wanted.status:
            passes &= self._trained == (wanted.status == "trained")
        if wanted.tag:
            passes &= self._of_prompts([prompt.has_tag(wanted.tag.lower()) for prompt in self._prompts])
        if wanted.prompt:
            part = wanted.prompt.lower()
            passes &= self._of_prompts([part in prompt.uid or part in prompt.text for prompt in self._prompts])
        found = np.flatnonzero(passes)
        if wanted.text:
            part, texts = wanted.text.lower(), self._texts
            found = found[np.array([part in texts[number] for number in found.tolist()], np.bool_)]
        return found

    def _of_prompts(self, passes: Sequence[bool]) -> NDArray[np.bool_]:
        """What is true of prompts, for the attempts at them."""
        return np.array(passes, np.bool_)[self._prompt_of]
