"""Keep the rollouts of each step beside the training: what a source of rollouts calls.

The loop's thread hands over what there is anyway; a thread of its own makes lines of it, packs and writes them while
the model trains. A step is written before the next one is handed over and before the checkpoint that covers it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.errors import RunDirectoryError, RunFailedError
from spurline_rl.group_runner import GivenUpPrompt
from spurline_rl.kept_rollouts.blocks import PieceTable, TokenScores, encode, encode_lost, split_groups
from spurline_rl.kept_rollouts.members import ROLLOUTS_FILE, MemberFile, cut_back, pack
from spurline_rl.trajectory import Group
from spurline_text.token_pieces import TokenPieces

_BLOCK_TOKENS = 1_000_000
"""Tokens of one line: what is there a second and a third time while it is written or read."""
_LARGEST_SHARE = 4
"""No step takes more than this part of the file; of larger ones prompts are left out, evenly, at last all of them."""
_PATIENCE_S = 600.0
"""More than any disk that still answers takes to write one step."""


@dataclass(frozen=True, eq=False)
class KeptStep:
    """What is kept of a step. groups: trained on. filtered: not trained on. lost: prompts given up meanwhile.

    column: the values of a token column of the batch for each turn of `groups`; called until the step is written, with
    columns that are not used again.
    """

    step: int
    groups: Sequence[Group]
    filtered: Sequence[Group]
    lost: Sequence[GivenUpPrompt]
    prompts_per_epoch: int
    column: Callable[[str], Sequence[NDArray[Any]]]


class RolloutKeeper:
    """Writes RUN_DIR/rollouts.jsonl.gz. most_bytes: what it may take up; 0 keeps nothing.

    Its methods are for one thread, the loop's. What fails beside it is raised by the next call.
    """

    def __init__(self, run_dir: Path, tokenizer: PreTrainedTokenizerBase, most_bytes: int) -> None:
        self._path = run_dir / ROLLOUTS_FILE
        self._most_bytes = most_bytes
        self._tokenizer = tokenizer
        self._file: MemberFile | None = None
        self._writing: Future[None] | None = None

    @property
    def is_on(self) -> bool:
        return self._most_bytes > 0

    def start(self, last_step: int) -> None:
        """Cut an earlier file back to the steps up to `last_step`, and open it.

        A damaged file refuses only a run that would add to it; with nothing to keep it stays as it is.
        """
        assert self._file is None, f"{self._path} is already open"
        try:
            cut_back(self._path, last_step)
        except RunDirectoryError:
            if self.is_on:
                raise
        if self.is_on:
            self._pieces = PieceTable(TokenPieces(self._tokenizer))
            self._file = MemberFile(self._path, self._most_bytes)

    def keep(self, taken: KeptStep) -> None:
        """Begin to write a step. Raises what went wrong with the one before."""
        self._wait()
        if self._file is None:
            self.start(taken.step - 1)
        assert self._file is not None, "nothing is kept, so nothing is to be handed over"
        self._writing = Future()
        # A daemon, which the end of the process does not wait for: the disk may not answer any more.
        Thread(target=self._run, args=(taken, self._writing), name="spurline-kept-rollouts", daemon=True).start()

    def flush(self) -> None:
        """Force the steps handed over to the disk. Raises what went wrong with the last one."""
        self._wait()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """End the thread and let go of the file. What went wrong does not hide an error that is on its way."""
        ended_by = sys.exception()
        try:
            self._wait()
        except Exception as failure:
            if ended_by is None:
                raise
            if failure is not ended_by:
                ended_by.add_note(f"Writing the rollouts failed too: {failure}")
        finally:
            if self._file is not None:
                self._file.close()
            self._file = None

    def _wait(self) -> None:
        """Until the step handed over last is written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result(_PATIENCE_S)
        except TimeoutError as error:
            raise RunFailedError(
                f"{self._path}: writing the rollouts of a step has not ended in {_PATIENCE_S:.0f} s. Does the disk "
                "still answer? Set source.keep_rollouts: 0 to go on without."
            ) from error

    def _run(self, taken: KeptStep, writing: Future[None]) -> None:
        try:
            self._write(taken)
        except BaseException as failure:  # noqa: BLE001 - raised on the loop's thread, by who waits for it
            writing.set_exception(failure)
        else:
            writing.set_result(None)

    def _write(self, taken: KeptStep) -> None:
        assert self._file is not None, "written after close"
        scores = TokenScores(
            *(np.concatenate([np.empty(0, np.float32), *taken.column(name)]) for name in ("old_logprobs", "advantages"))
        )
        largest, prompts, one_in = self._most_bytes // _LARGEST_SHARE, max(len(taken.groups), len(taken.filtered)), 1
        packed = pack(taken.step, self._lines(taken, scores, one_in))
        while len(packed) > largest:
            if one_in >= prompts:
                # A single prompt is too large.
                packed = pack(taken.step, self._lost_lines(taken))
                break
            one_in = min(prompts, max(one_in + 1, -(-one_in * len(packed) // largest)))
            packed = pack(taken.step, self._lines(taken, scores, one_in))
        if len(packed) <= largest:
            self._file.append(taken.step, packed)

    def _lines(self, taken: KeptStep, scores: TokenScores, one_in: int) -> Iterator[bytes]:
        """The lines of a step. one_in: of so many prompts one."""
        groups, scores = _one_in(taken.groups, scores, one_in)
        first = 0
        for part in split_groups(groups, _BLOCK_TOKENS):
            last = first + _num_responses(groups[part])
            own = TokenScores(scores.old_logprobs[first:last], scores.advantages[first:last])
            yield self._line(taken, "trained", groups[part], own, one_in)
            first = last
        filtered = taken.filtered[::one_in]
        for part in split_groups(filtered, _BLOCK_TOKENS):
            yield self._line(taken, "filtered", filtered[part], None, one_in)
        yield from self._lost_lines(taken)

    def _lost_lines(self, taken: KeptStep) -> Iterator[bytes]:
        if taken.lost:
            lost = [{"uid": prompt.uid, "draw": prompt.draw, "reason": prompt.reason} for prompt in taken.lost]
            yield encode_lost(taken.step, lost)

    def _line(
        self, taken: KeptStep, status: Any, groups: Sequence[Group], scores: TokenScores | None, one_in: int
    ) -> bytes:
        per_epoch = taken.prompts_per_epoch
        return encode(taken.step, status, groups, scores, self._pieces, prompts_per_epoch=per_epoch, one_in=one_in)


def _one_in(groups: Sequence[Group], scores: TokenScores, one_in: int) -> tuple[Sequence[Group], TokenScores]:
    """Every `one_in`-th group with its scores."""
    if one_in == 1:
        return groups, scores
    ends = np.cumsum([_num_responses([group]) for group in groups])[:-1]
    old, advantages = np.split(scores.old_logprobs, ends), np.split(scores.advantages, ends)
    return groups[::one_in], TokenScores(np.concatenate(old[::one_in]), np.concatenate(advantages[::one_in]))


def _num_responses(groups: Sequence[Group]) -> int:
    return sum(int(group.flat.num_response.sum()) for group in groups)
