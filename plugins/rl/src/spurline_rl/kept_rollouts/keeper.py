"""Write the rollouts of each step on a thread, while the model trains.

A step is written before the next one is handed over and before the checkpoint that covers it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from spurline.errors import RunFailedError
from spurline_rl.group_runner import GivenUpPrompt
from spurline_rl.kept_rollouts.files import RolloutFolder, packed
from spurline_rl.kept_rollouts.table import SCHEMA, Status, TokenTexts, attempts_table, given_up_table
from spurline_rl.trajectory import Group
from spurline_text.token_pieces import TokenPieces

_BYTES_PER_TOKEN = 10
"""Upper estimate of a file's bytes for each token, texts included."""
_LARGEST_SHARE = 4
"""A step takes at most about 1 / this of the folder. Of a larger step only every n-th prompt is kept."""
_PATIENCE_S = 600.0
"""Seconds to write one step, more than any disk takes that still answers."""


@dataclass(frozen=True, eq=False)
class KeptStep:
    """The part of a step that is kept.

    Attributes:
        groups: Groups that were trained on.
        filtered: Groups that were not trained on.
        lost: Prompts given up meanwhile.
        prompts_per_epoch: Prompts of a pass over the data.
        column: Returns the values of a token column of the batch for each turn of `groups`; called on the thread that
            writes.
    """

    step: int
    groups: Sequence[Group]
    filtered: Sequence[Group]
    lost: Sequence[GivenUpPrompt]
    prompts_per_epoch: int
    column: Callable[[str], Sequence[NDArray[Any]]]


class RolloutKeeper:
    """Writes the files of `RUN_DIR/rollouts`, which take `most_bytes` at most; 0 keeps nothing.

    Only the loop's thread may call its methods. The next call raises an error of the thread that writes.
    """

    def __init__(self, run_dir: Path, tokenizer: PreTrainedTokenizerBase, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._folder = RolloutFolder(run_dir, most_bytes)
        self._tokenizer = tokenizer
        self._pieces: TokenPieces | None = None
        self._writing: Future[None] | None = None

    @property
    def is_on(self) -> bool:
        return self._most_bytes > 0

    def start(self, last_step: int) -> None:
        """Remove the rollouts of steps after `last_step`."""
        self._folder.start(last_step)

    def keep(self, taken: KeptStep) -> None:
        """Begin to write a step. Raises the error of the step before."""
        self._wait()
        self._writing = Future()
        # The end of the process does not wait for a daemon: the disk may not answer any more.
        Thread(target=self._run, args=(taken, self._writing), name="spurline-kept-rollouts", daemon=True).start()

    def flush(self) -> None:
        """Force the steps handed over to the disk. Raises the error of the last one."""
        self._wait()
        if self.is_on:
            self._folder.flush()

    def close(self) -> None:
        """End the thread. Its error does not hide one that is being raised."""
        ended_by = sys.exception()
        try:
            self._wait()
        except Exception as failure:
            if ended_by is None:
                raise
            if failure is not ended_by:
                ended_by.add_note(f"Writing the rollouts failed too: {failure}")

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result(_PATIENCE_S)
        except TimeoutError as error:
            raise RunFailedError(
                f"Writing the rollouts of a step has not ended in {_PATIENCE_S:.0f} s. Does the disk still answer? "
                "Set source.keep_rollouts: 0 to go on without."
            ) from error

    def _run(self, taken: KeptStep, writing: Future[None]) -> None:
        try:
            self._write(taken)
        except BaseException as failure:  # noqa: BLE001 - raised on the loop's thread
            writing.set_exception(failure)
        else:
            writing.set_result(None)

    def _write(self, taken: KeptStep) -> None:
        tokens = sum(len(group.flat.tokens) for group in (*taken.groups, *taken.filtered))
        one_in = max(1, -(-tokens * _BYTES_PER_TOKEN * _LARGEST_SHARE // self._most_bytes))
        trained, filtered = taken.groups[::one_in], taken.filtered[::one_in]
        is_kept = [place % one_in == 0 for place, group in enumerate(taken.groups) for _ in range(len(group.flat))]
        scores = {
            name: np.concatenate([*compress(taken.column(name), is_kept)])
            for name in ("old_logprobs", "advantages")
            if trained
        }
        if self._pieces is None:
            self._pieces = TokenPieces(self._tokenizer)
        texts = TokenTexts(self._pieces, [*trained, *filtered])
        kept: dict[Status, Sequence[Group]] = {"trained": trained, "filtered": filtered}
        tables = [
            attempts_table(
                taken.step,
                status,
                groups,
                scores if status == "trained" else {},
                texts,
                taken.prompts_per_epoch,
                one_in,
            )
            for status, groups in kept.items()
            if groups
        ]
        tables.append(given_up_table(taken.step, taken.lost))
        self._folder.add(taken.step, packed(tables, SCHEMA, texts.as_metadata()))
