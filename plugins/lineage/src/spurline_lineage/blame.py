"""Compute how much each prompt or sample has moved the weights in one step of a run.

The step is trained once more. In each of its optimizer steps, the backend computes the gradient G of the mini-batch,
and the gradient g of each group of segments with the same uid, with the same loss, loss weights and normaliser. The
share of a group is g.G / G.G, summed over optimizer steps. The shares add up to 1, since a loss is a sum over tokens.
A negative share belongs to a group that alone would have moved the weights against the step.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline.errors import UserError
from spurline.files import write_bytes, write_errors
from spurline.plugins import hookimpl
from spurline.plugins.run_view import RunView
from spurline.protocols.backend import Backend
from spurline.protocols.loss import Objective
from spurline.terminal import tell
from spurline_lineage.fork import checkpoint_before, trained_again
from spurline_models.separation import SeparatedBatch

BLAME_FOLDER = "blame"
"""Name of the folder inside the run directory with a JSON file for each step that was explained."""


@dataclass
class Part:
    """The part that one group had in a step.

    Attributes:
        uid: Name of the prompt or sample.
        product: g.G, summed over the optimizer steps.
        loss_tokens: Number of the group's tokens with loss.
        text: Text of the group's first sequence.
        rewards: Returns of the attempts at the prompt, or none if nothing was rewarded.
    """

    uid: str
    product: float = 0.0
    loss_tokens: int = 0
    text: str = ""
    rewards: tuple[float, ...] = ()


@dataclass
class Blame:
    """Hooks that measure one step while it is trained again."""

    step: int
    parts: dict[str, Part] = field(default_factory=dict[str, Part])
    squared_norm: float = 0.0
    """G.G, summed over the optimizer steps."""
    _rewards: dict[str, tuple[float, ...]] = field(default_factory=dict[str, "tuple[float, ...]"])
    _run: RunView | None = None

    def shares(self) -> list[tuple[float, Part]]:
        """Return the share of each group, largest first. Raises UserError if the step has not moved the weights."""
        if self.squared_norm == 0:
            raise UserError(f"Step {self.step} has no gradient, so no group has a share in it.")
        shares = [(part.product / self.squared_norm, part) for part in self.parts.values()]
        return sorted(shares, key=lambda each: -each[0])

    @hookimpl
    def on_run_start(self, run: RunView) -> None:
        self._run = run

    @hookimpl(optionalhook=True)
    def on_rollouts_scored(self, groups: tuple[Any, ...]) -> None:
        self._rewards = {group.uid: tuple(group.returns.tolist()) for group in groups}

    @hookimpl(wrapper=True)
    def train_step(self, step: int) -> Generator[None, Mapping[str, float], Mapping[str, float]]:
        assert self._run is not None, "train_step before on_run_start"
        backend = self._run.backend
        update = backend.update

        def measured(batch: TrainingBatch, objective: Objective, *, role: str = "policy") -> Mapping[str, float]:
            if role == "policy":
                self._measure(backend, batch, objective)
            return update(batch, objective, role=role)

        if step != self.step:
            return (yield)
        # Only the calls of `update` show the mini-batches with their final weights and normalisers.
        vars(backend)["update"] = measured
        try:
            return (yield)
        finally:
            del vars(backend)["update"]

    def _measure(self, backend: Backend, batch: TrainingBatch, objective: Objective) -> None:
        assert self._run is not None
        multiple = self._run.config.backend.layout().row_multiple
        whole = {name: gradient.clone() for name, gradient in backend.gradients(batch, objective)}
        self.squared_norm += sum(_dot(gradient, gradient) for gradient in whole.values())
        # In rows of its own, no group computes its neighbours in a packed row.
        for uid, alone in groups_alone(SeparatedBatch.of(batch, objective.loss.needs).batch):
            part = self.parts.setdefault(uid, Part(uid, rewards=self._rewards.get(uid, ())))
            part.text = part.text or self._text(alone)
            part.loss_tokens += alone.num_loss_tokens
            gradients = backend.gradients(alone.pad_rows(multiple), objective)
            part.product += sum(_dot(gradient, whole[name]) for name, gradient in gradients)

    def _text(self, alone: TrainingBatch) -> str:
        assert self._run is not None
        row = int(alone.tokens["loss_weights"].any(1).int().argmax())
        segment_ids = alone.tokens["segment_ids"][row]
        is_own = segment_ids == segment_ids[alone.tokens["loss_weights"][row].bool()][0]
        return str(self._run.tokenizer.decode(alone.tokens["input_ids"][row][is_own].tolist()))


def groups_alone(batch: TrainingBatch) -> Iterator[tuple[str, TrainingBatch]]:
    """Yield (uid, batch) for each uid with loss. The batch has all rows of its units, and loss on its own segments."""
    weights, uids = batch.tokens["loss_weights"], batch.segments["uid"]
    starts = torch.from_numpy(uids.offsets[:-1].astype(np.int64)).unsqueeze(1)
    # Padding has the segment id 0, and no loss.
    places = (starts + batch.tokens["segment_ids"].long() - 1).clamp(min=0)
    names = {uid: number for number, uid in enumerate(dict.fromkeys(uids.values.tolist()))}
    numbers = torch.tensor([names[uid] for uid in uids.values.tolist()], dtype=torch.int64)[places]
    for uid, number in names.items():
        own = torch.where(numbers == number, weights, 0.0)
        rows = torch.isin(batch.unit_ids, batch.unit_ids[own.any(1)])
        if bool(rows.any()):
            yield uid, batch.with_tokens(loss_weights=own).take(torch.nonzero(rows).flatten())


def write_shares(run_dir: Path, step: int, num_groups: int, shown: Sequence[tuple[float, Part]]) -> None:
    """Write the largest and the smallest of the shares of a step, with their texts, for `spurline view`."""
    path = run_dir / BLAME_FOLDER / f"step-{step:06d}.json"
    groups = [{"share": share, **asdict(part)} for share, part in shown]
    content = json.dumps({"step": step, "num_groups": num_groups, "groups": groups}).encode()
    with write_errors(path):
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, content)


def _dot(one: Tensor, other: Tensor) -> float:
    return float(torch.dot(one.flatten().double(), other.flatten().double()))


def blame_step(run_dir: Path, step: int, overrides: Sequence[str] = ()) -> Blame:
    """Train a step of a run again, with these settings changed, and return the part of each group in its update."""
    blame, checkpoint = Blame(step), checkpoint_before(run_dir, step)
    first = 1 if checkpoint is None else checkpoint.step + 1
    if first < step:
        tell(f"Steps {first} to {step - 1} are trained first, since there is no later checkpoint before step {step}.")
    with trained_again(run_dir, checkpoint, step, overrides, blame, recalls=True):
        return blame
