"""Record the groups that a run trained on, and train on them again.

Checkpoints and recordings store groups as plain arrays and JSON, which are read back bit for bit. Groups are written in
blocks, so that only one block is in memory twice. A block joins the arrays of all its turns into a few long arrays, and
holds a prompt that neighboring turns have in common once.

A run with source `recorded_rollouts` generates nothing. It depends only on its config and the recording. It can show
the effect of another loss on the same data. With the settings of the recorded run, it trains the same weights, bit for
bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from spurline.data.batch import TrainingBatch
from spurline.errors import CheckpointWriteError, DataError
from spurline.files import write_failure
from spurline.protocols.source import SourceContext
from spurline.protocols.stateful import StateParts
from spurline.run.checkpoints.state_files import read_state, write_state
from spurline_async_rl.source.configs import RecordedRolloutsConfig
from spurline_async_rl.source.staleness import staleness_metrics
from spurline_rl.draws import Draw
from spurline_rl.evaluation_configs import HeldOutConfig
from spurline_rl.group_runner import Outcome
from spurline_rl.prompt_source import Collected, PromptSource
from spurline_rl.protocols.environment import Environment
from spurline_rl.trajectory import Group, Trajectory, Turn, share_prompts, turns_of

_FIELDS = ("response_ids", "loss_mask", "logprobs", "versions", "rewards", "support", "routed_experts")
"""The stored fields of a turn besides its prompt."""
_ABSENT = -1
RECORDED_GROUPS = "groups"
"""Folder of the recorded groups, in the run directory."""
_BLOCK_BYTES = 32 << 20


def groups_state(groups: Sequence[Group]) -> dict[str, object]:
    """Return the state of groups. They must not change until the state is written, since blocks are made only then."""
    return {"blocks": StateParts(lambda: map(_block_state, _blocks(groups)), is_frozen=True)}


def groups_of(state: Mapping[str, Any]) -> Iterator[Group]:
    """Yield the groups of a `groups_state`, and read only one block at a time."""
    # Earlier checkpoints and recordings have all groups in one block.
    return (group for block in state.get("blocks", [state]) for group in _groups_of_block(block))


def _blocks(groups: Sequence[Group]) -> Iterator[Sequence[Group]]:
    block: list[Group] = []
    num_bytes = 0
    for group in groups:
        block.append(group)
        arrays = (getattr(turn, name) for turn in turns_of([group]) for name in ("prompt_ids", *_FIELDS))
        num_bytes += sum(array.nbytes for array in arrays if array is not None)
        if num_bytes >= _BLOCK_BYTES:
            yield block
            block, num_bytes = [], 0
    if block:
        yield block


def _block_state(groups: Sequence[Group]) -> dict[str, object]:
    turns = turns_of(groups)
    prompts, starts = share_prompts([turn.prompt_ids for turn in turns])
    return {
        "prompts": {"values": prompts, "starts": starts, "lengths": np.array([len(turn.prompt_ids) for turn in turns])},
        "groups": [
            {
                "uid": group.uid,
                "draw": group.draw,
                "trajectories": [_trajectory(item) for item in group.trajectories],
                "columns": dict(group.columns),
                "tags": dict(group.tags),
                "token_columns": dict(group.token_columns),
                "prompts": dict(group.prompts),
            }
            for group in groups
        ],
        "finish_reasons": [turn.finish_reason for turn in turns],
        "engines": [list(turn.engines) for turn in turns],
        "fields": {name: _joined([getattr(turn, name) for turn in turns]) for name in _FIELDS},
    }


def _engines(stored: str | Sequence[str]) -> tuple[str, ...]:
    # Earlier versions stored the names as one text.
    return tuple(filter(None, stored.split(", "))) if isinstance(stored, str) else tuple(stored)


def _groups_of_block(state: Mapping[str, object]) -> list[Group]:
    fields = cast("Mapping[str, Mapping[str, Any]]", state["fields"])
    columns = {name: iter(_split(joined)) for name, joined in fields.items()}
    # Earlier recordings have the prompt of each turn among the fields.
    if "prompts" in state:
        columns["prompt_ids"] = iter(_split_prompts(**cast("Mapping[str, Any]", state["prompts"])))
    reasons = cast("Sequence[Any]", state["finish_reasons"])
    # Earlier checkpoints and recordings have no engines.
    engines = cast("Sequence[str | Sequence[str]]", state.get("engines", [()] * len(reasons)))
    ends = iter(zip(reasons, engines, strict=True))

    def next_turn() -> Turn:
        values: dict[str, Any] = {name: next(column) for name, column in columns.items()}
        reason, names = next(ends)
        return Turn(**values, finish_reason=reason, engines=_engines(names))

    return [
        Group(
            group["uid"],
            group["draw"],
            tuple(
                Trajectory(
                    group["uid"],
                    item["sample"],
                    tuple(next_turn() for _ in range(item["turns"])),
                    item["rewards"],
                    json.loads(item["info"]),
                    # Earlier checkpoints have no retries, and groups without the last fields.
                    item.get("retries", 0),
                    item.get("counts", True),
                )
                for item in group["trajectories"]
            ),
            group.get("columns", {}),
            group.get("tags", {}),
            group.get("token_columns", {}),
            group.get("prompts", {}),
        )
        for group in cast("Sequence[Mapping[str, Any]]", state["groups"])
    ]


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    return {
        "sample": trajectory.sample,
        "turns": len(trajectory.turns),
        "rewards": {name: float(value) for name, value in trajectory.rewards.items()},
        "retries": trajectory.retries,
        "counts": trajectory.counts,
        # `info` is stored as text, so that no value of an environment can be mistaken for an array of this state.
        "info": json.dumps(dict(trajectory.info), default=str),
    }


def _joined(arrays: Sequence[NDArray[Any] | None]) -> dict[str, object]:
    present = [array for array in arrays if array is not None]
    lengths = np.array([_ABSENT if array is None else len(array) for array in arrays], np.int64)
    if not present:
        return {"lengths": lengths}
    return {"lengths": lengths, "values": np.concatenate(present)}


def _split(joined: Mapping[str, Any]) -> list[NDArray[Any] | None]:
    lengths, values = joined["lengths"], joined.get("values")
    ends = np.cumsum(np.maximum(lengths, 0))
    return [
        None if length == _ABSENT or values is None else values[end - length : end].copy()
        for length, end in zip(lengths, ends, strict=True)
    ]


def _split_prompts(
    values: NDArray[np.int32], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> list[NDArray[np.int32]]:
    """Return a copy of each turn's prompt. Turns with the same prompt share one copy."""
    places = [*zip(starts.tolist(), lengths.tolist(), strict=True)]
    copies = {(start, length): values[start : start + length].copy() for start, length in {*places}}
    return [copies[place] for place in places]


def recorded_step(run_dir: Path, step: int) -> Path:
    """Return the path of a step's groups, without suffix."""
    return run_dir / RECORDED_GROUPS / f"step-{step:06d}"


def record_groups(run_dir: Path, step: int, groups: Sequence[Group]) -> None:
    """Write the groups that a step trains on. Raises RunFailedError if they cannot be written."""
    path = recorded_step(run_dir, step)
    try:
        write_state(path, groups_state(groups))
    except (OSError, CheckpointWriteError) as error:
        raise write_failure(path, error) from error


class RecordedRolloutSource(PromptSource):
    """A source that reads the groups of each step from a recording."""

    def __init__(self, config: RecordedRolloutsConfig, context: SourceContext) -> None:
        super().__init__(config, context)
        self._config = config

    def build(self, step: int) -> TrainingBatch:
        """Return the batch of the recorded groups. Raises DataError if the recording does not have this step."""
        path = recorded_step(Path(self._config.recorded), step)
        try:
            groups = tuple(groups_of(read_state(path)))
        except FileNotFoundError as error:
            raise DataError(
                f"source.recorded: {self._config.recorded} has no groups of step {step} ({error.filename}). Record "
                "them with source.record_groups: true, or lower steps."
            ) from error
        collected = Collected(groups, groups, 0)
        ages = staleness_metrics(groups, step - 1, self._config.max_staleness, masked=0)
        batch, _ = self._batch(step, collected, self._backend, retries=0, seconds=0.0)
        return replace(batch, info={**batch.info, **ages})

    def epoch(self, step: int) -> float:
        return step * self._config.prompts_per_step / self._prompts.prompts_per_epoch

    def make_attempts(
        self, prompts: Sequence[Draw], held_out: HeldOutConfig, environment: Environment | None = None
    ) -> Sequence[Outcome]:
        raise AssertionError("the config allows no held-out prompts")
