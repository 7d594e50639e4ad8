"""Read the rollouts that a finished or running run has kept: one Parquet file per step.

    rollouts = KeptRollouts(run_dir)
    for attempt in rollouts.attempts(steps=[40]):
        print(attempt.uid, attempt.reward, attempt.turns[-1].response_text)

Each call lists the folder again, so it finds the files that a running run has added. Reading needs no tokenizer, no
config and no torch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from spurline.errors import RunDirectoryError
from spurline.files import regular_file
from spurline_rl.group_runner import GivenUpPrompt
from spurline_rl.kept_rollouts.table import DETAILS, SCHEMA
from spurline_rl.trajectory import Trajectory, Turn
from spurline_text.token_pieces import shown, text_of

ROLLOUTS_FOLDER = "rollouts"
"""Name of the folder inside the run directory."""
_NAME = re.compile(r"step-(\d+)\.parquet")


def step_files(run_dir: Path) -> dict[int, Path]:
    """Return the file of each step, in order of steps. If the folder does not exist, the mapping is empty.

    Raises:
        RunDirectoryError: If the folder cannot be read.
    """
    folder = run_dir / ROLLOUTS_FOLDER
    try:
        named = [(_NAME.fullmatch(name), folder / name) for name in os.listdir(folder)]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunDirectoryError(f"{folder}: cannot be read: {error.strerror or error}.") from error
    return dict(sorted((int(name[1]), path) for name, path in named if name is not None))


def read_step(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Return a table of the attempts and given-up prompts of a step. If `columns` is None, it has all columns.

    Raises:
        FileNotFoundError: If there is no such file. A run may remove it at any time.
        RunDirectoryError: If the file cannot be read, is damaged, or has other columns.
    """
    try:
        with open(path, "rb", opener=regular_file) as source, pq.ParquetFile(source) as file:
            if file.schema_arrow.names != SCHEMA.names:
                raise RunDirectoryError(
                    f"{path}: another version wrote it, or it is damaged. The run does not need it."
                )
            return file.read(None if columns is None else list(columns))
    except FileNotFoundError:
        raise
    except (OSError, pa.ArrowException) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RunDirectoryError(
            f"{path}: cannot be read: {why}. If it is damaged, remove it: the run does not need it."
        ) from error


@dataclass(frozen=True)
class LostPrompt:
    """A prompt that was given up in a step because its attempts failed, and the reason.

    `info` holds the label of its environment in a run with several, as that of attempts does.
    """

    step: int
    uid: str
    draw: int
    reason: str
    info: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class KeptTurn:
    """One call of the model. Arrays are read-only. P and A are the numbers of prompt tokens and response tokens.

    Attributes:
        prompt_ids: int32 [P], all tokens before the response, including earlier turns.
        response_ids: int32 [A].
        finish_reason: See `spurline_rl.trajectory.Turn`.
        rewards: float32 [A], the reward of each token. The last one includes the weighted terms of the attempt.
        logprobs: float32 [A], the engine's logprobs when it sampled.
        gap: float16 [A], the trained model's logprobs before the update minus `logprobs`. None for filtered attempts.
        advantages: float32 [A]. None for filtered attempts.
        versions: int32 [A], the step whose update produced the weights that generated the token.
        ages: int32 [A], the number of updates between these weights and training on the token. It is 0 in synchronous
            runs.
        loss_mask: uint8 [A], 0 for tokens that were not trained on.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    finish_reason: str
    rewards: NDArray[np.float32] | None
    logprobs: NDArray[np.float32] | None
    gap: NDArray[np.float16] | None
    advantages: NDArray[np.float32] | None
    versions: NDArray[np.int32] | None
    ages: NDArray[np.int32] | None
    loss_mask: NDArray[np.uint8]
    _pieces: _StoredPieces

    @property
    def reward(self) -> float | None:
        """Return the sum of the rewards of the turn's tokens."""
        return None if self.rewards is None else float(self.rewards.sum(dtype=np.float64))

    @property
    def prompt_text(self) -> str:
        return text_of(self._pieces.of(self.prompt_ids))

    @property
    def response_text(self) -> str:
        return text_of(self._pieces.of(self.response_ids))

    @property
    def prompt_pieces(self) -> list[str]:
        """Return a text for each prompt token; see `spurline_text.token_pieces.shown`."""
        return list(shown(self._pieces.of(self.prompt_ids)))

    @property
    def response_pieces(self) -> list[str]:
        """Return a text for each response token."""
        return list(shown(self._pieces.of(self.response_ids)))

    @property
    def special_ids(self) -> frozenset[int]:
        """Return the ids of special tokens, which belong to the template or the model and are not text."""
        return self._pieces.special


@dataclass(frozen=True, eq=False)
class KeptAttempt:
    """One attempt at a prompt.

    Attributes:
        status: `filtered` if the step did not train on the attempt.
        uid, draw, epoch: The prompt, the number of its draw, and the pass over the data.
        columns: Numbers from those columns of the prompt's row that `source.carry` names.
        tags: Short texts and numbers from the prompt's row.
        sample: Number of the attempt in its group.
        reward: The weighted sum of the reward terms, plus the rewards of turns.
        rewards: Reward terms by name, before weights.
        advantage: The advantage of all tokens, or None if tokens have different advantages.
        retries: Number of failed tries before this attempt.
        counts: Whether advantages compare other attempts with this one.
        info: The environment's `info` of the attempt.
        info_is_whole: Whether `info` has all values as they were. Values that are not JSON are kept as texts.
        engines: Names of the engines that generated the tokens; empty if they have no names.
        finish_reason: Finish reason of the last turn.
    """

    step: int
    status: Literal["trained", "filtered"]
    uid: str
    draw: int
    epoch: int
    columns: Mapping[str, float]
    tags: Mapping[str, Any]
    sample: int
    reward: float
    rewards: Mapping[str, float]
    advantage: float | None
    retries: int
    counts: bool
    info: Mapping[str, Any]
    info_is_whole: bool
    engines: Sequence[str]
    num_response_tokens: int
    finish_reason: str
    _table: pa.Table
    _row: int
    _pieces: _StoredPieces

    @cached_property
    def turns(self) -> tuple[KeptTurn, ...]:
        """Return the calls of the model, in order."""
        stored = {name: self._values(name) for name in DETAILS if pa.types.is_list(DETAILS[name])}
        finish, *sizes = (stored.pop(f"turn_{name}") for name in ("finish", "prompt", "response"))
        stored["rewards"], ids = stored.pop("token_rewards"), stored.pop("ids")
        stored["ages"] = None if stored["versions"] is None else self.step - 1 - stored["versions"]
        if stored["advantages"] is not None:
            stored["advantages"] = stored["advantages"].astype(np.float32)
        made: list[KeptTurn] = []
        for number, (prompt, response) in enumerate(zip(*sizes, strict=True)):
            fields: dict[str, Any] = {name: None if of is None else of[:response] for name, of in stored.items()}
            stored = {name: None if of is None else of[response:] for name, of in stored.items()}
            context, ids = ids[: prompt + response], ids[prompt + response :]
            made.append(
                KeptTurn(
                    prompt_ids=context[:prompt],
                    response_ids=context[prompt:],
                    finish_reason=str(finish[number]),
                    _pieces=self._pieces,
                    **fields,
                )
            )
        return tuple(made)

    def as_trajectory(self) -> Trajectory:
        """Return the attempt as the step had it; see `KeptRollouts.outcomes`."""
        names = ("prompt_ids", "response_ids", "finish_reason", "loss_mask", "logprobs", "versions", "rewards")
        turns = tuple(Turn(**{name: getattr(turn, name) for name in names}) for turn in self.turns)
        return Trajectory(self.uid, self.sample, turns, self.rewards, self.info, self.retries, self.counts)

    def _values(self, name: str) -> Any:
        values = self._table.column(name)[self._row].values
        return None if values is None else values.to_numpy(zero_copy_only=False)


class KeptRollouts:
    """The kept rollouts of a run. The run may still be in progress.

    Raises:
        RunDirectoryError: If the folder does not exist, or later if a file cannot be read.
    """

    def __init__(self, run_dir: Path | str) -> None:
        self._run_dir = Path(run_dir)
        if not self._run_dir.is_dir():
            raise RunDirectoryError(f"There is no folder {run_dir} to read rollouts from. Give a run's run_dir.")

    @property
    def steps(self) -> Sequence[int]:
        """Return the steps with kept rollouts, ascending. Old steps are missing if they were deleted to save space."""
        return list(step_files(self._run_dir))

    def attempts(self, steps: Iterable[int] | None = None) -> Iterator[KeptAttempt]:
        """Yield attempts step by step, first those that were trained on, then those that were filtered.

        A step without a file has no attempts. If `steps` is None, all steps are read.
        """
        for table in self._tables(steps, None):
            yield from _attempts(table)

    def given_up(self, steps: Iterable[int] | None = None) -> Iterator[LostPrompt]:
        """Yield the prompts that were given up in these steps."""
        for table in self._tables(steps, ["status", "step", "uid", "draw", "reason", "info"]):
            for row in table.to_pylist():
                if row.pop("status") == "given_up":
                    yield LostPrompt(**row | {"info": json.loads(row["info"] or "{}")})

    def outcomes(self, step: int) -> Mapping[str, tuple[Trajectory, ...] | GivenUpPrompt]:
        """Return for each prompt of a step, by uid, all its attempts with the same bits, or that it was given up.

        Prompts with tokens that are older than the last update, or with an `info` that is not whole, are left out.
        Turns have no `engines`, `support` and `routed_experts`, which are not kept.
        """
        found: dict[str, tuple[Trajectory, ...] | GivenUpPrompt] = {
            lost.uid: GivenUpPrompt(lost.uid, lost.draw, lost.reason, lost.info.get("environment", ""))
            for lost in self.given_up([step])
        }
        for uid, attempts in groupby(self.attempts([step]), attrgetter("uid")):
            kept = [*attempts]
            made = tuple(attempt.as_trajectory() for attempt in kept)
            versions = [turn.versions for attempt in made for turn in attempt.turns]
            is_new = all(each is not None and bool((each == step - 1).all()) for each in versions)
            if is_new and all(attempt.info_is_whole for attempt in kept):
                found[uid] = made
        return found

    def _tables(self, steps: Iterable[int] | None, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        files = step_files(self._run_dir)
        for step in files if steps is None else steps:
            if step in files:
                with suppress(FileNotFoundError):
                    yield read_step(files[step], columns)


def _attempts(table: pa.Table) -> Iterator[KeptAttempt]:
    facts = [*(name for name in SCHEMA.names if name in KeptAttempt.__annotations__), "tokens", "finish"]
    table, pieces = table.combine_chunks(), _StoredPieces(table.schema.metadata)
    for number, row in enumerate(table.select(facts).to_pylist()):
        if row["status"] == "given_up":
            continue
        row |= {name: json.loads(row[name]) for name in ("columns", "tags", "rewards", "info", "engines")}
        row |= {"num_response_tokens": row.pop("tokens"), "finish_reason": row.pop("finish")}
        yield KeptAttempt(**row, _table=table, _row=number, _pieces=pieces)


class _StoredPieces:
    """The UTF-8 bytes of each token of a step, read from the metadata of the step's file."""

    def __init__(self, texts: Mapping[bytes, bytes]) -> None:
        self._texts = texts

    def of(self, ids: NDArray[np.int32]) -> list[bytes]:
        return [self._pieces[token_id] for token_id in ids.tolist()]

    @cached_property
    def _pieces(self) -> Mapping[int, bytes]:
        stored: dict[str, str] = json.loads(self._texts[b"pieces"])
        return {int(token_id): piece.encode(errors="surrogateescape") for token_id, piece in stored.items()}

    @cached_property
    def special(self) -> frozenset[int]:
        return frozenset(json.loads(self._texts[b"special"]))
