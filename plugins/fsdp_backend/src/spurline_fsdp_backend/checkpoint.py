"""Write what the ranks hold, and read it on any number of ranks, divided in any way.

A folder for each model that is trained, `policy` and `critic`, has the pieces of all ranks (`spurline.model.pieces`):
trained weights and persistent buffers under their names, the optimizer's tensors under NAME/KEY. With adapters these
are all that is trained. `state.json`, of the first rank: the update count, the digests of the weights that are not
here and of those the run started from, the optimizer's name and numbers, and how the ranks were divided. Random
generators have no state, as they are seeded anew in each step.

Place on the way: the controller renames the folder into place, and has told ranks which files to verify before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.digests import FileDigest
from spurline.errors import CheckpointError, CheckpointWriteError
from spurline.model.pieces import PieceIndex, held_pieces, write_pieces
from spurline.model.saved_state import check_frozen, check_weights, read_facts, write_facts
from spurline.optimizers.state import OptimizerState, describe
from spurline.protocols.backend import Role
from spurline_fsdp_backend.trained_model import ShardedTrainedModel

BACKEND = "fsdp"
FORMAT = "fsdp-1"


@dataclass(frozen=True)
class SavedPart:
    """What one rank has written: digests by path, or why it could not."""

    digests: Mapping[str, FileDigest]
    failure: str | None = None


Models = Mapping[Role, ShardedTrainedModel]


def save(path: Path, models: Models, layout: Mapping[str, int]) -> dict[str, FileDigest]:
    """Write this rank's part into the folder; returns digests by path in it. layout: how the ranks are divided.

    Nothing is exchanged. Raises CheckpointWriteError.
    """
    rank = dist.get_rank()
    digests: dict[str, FileDigest] = {}
    for role, trained in models.items():
        folder = path / role
        state = trained.optimization.state()
        try:
            folder.mkdir(exist_ok=True)
            if rank == 0:
                write_facts(folder, _facts(trained, state, layout))
        except OSError as error:
            raise CheckpointWriteError(str(error)) from error
        tensors = {**_model_tensors(trained), **state.tensors}
        written = write_pieces(folder, rank, held_pieces(tensors, first=rank == 0))
        digests.update({f"{role}/{name}": digest for name, digest in written.items()})
    return digests


def read_fitting(path: Path, models: Models) -> Mapping[Role, SavedModel]:
    """What was saved of the models, from headers alone; nothing is changed. A collective.

    Raises CheckpointError, on all ranks alike, unless all of it fits.
    """
    saved = _read_together(path, models)
    for role, trained in models.items():
        saved[role].check(trained)
    return saved


@dataclass(frozen=True)
class SavedModel:
    """What the folder of a model holds, from its headers; values are read when they are put into place."""

    index: PieceIndex
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> SavedModel:
        """Raises CheckpointError for a folder of another backend, and one that is damaged."""
        facts = read_facts(folder, BACKEND, FORMAT)
        return cls(PieceIndex.of(folder), facts)

    @property
    def weights(self) -> list[str]:
        """Names of the weights and buffers, without what belongs to the optimizer."""
        return [key for key in self.index.tensors if "/" not in key]

    def check(self, trained: ShardedTrainedModel) -> None:
        """Raises CheckpointError unless it fits this model and its optimizer; changes nothing."""
        where = self.index.folder
        saved = {name: self.index.tensors[name].describe() for name in self.weights}
        check_weights(where, saved, {name: describe(value) for name, value in _model_tensors(trained).items()})
        check_frozen(where, self.facts["frozen_weights"], trained.frozen_weights)
        shapes = {
            key: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            for key, stored in self.index.tensors.items()
            if "/" in key
        }
        try:
            trained.optimization.check(OptimizerState.read(shapes, self.facts["optimizer"]))
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error

    def put_into(self, trained: ShardedTrainedModel) -> None:
        """Read what this rank holds of it, straight into place."""
        with torch.no_grad():
            for name, target in _model_tensors(trained).items():
                self.index.fill(target, name)
        stored = _StoredState(self.index, trained.parameters)
        trained.optimization.restore(OptimizerState.read(stored, self.facts["optimizer"]))
        trained.updates = int(self.facts["updates"])
        trained.initial_weights = str(self.facts["initial_weights"])


class _StoredState(Mapping[str, Tensor]):
    """The optimizer's tensors by NAME/KEY, each read when it is asked for, in the parts of its parameter."""

    def __init__(self, index: PieceIndex, parameters: Mapping[str, Tensor]) -> None:
        self._index = index
        self._parameters = parameters
        self._keys = [key for key in index.tensors if "/" in key]

    def __getitem__(self, key: str) -> Tensor:
        return self._index.read_like(key, self._parameters[key.rpartition("/")[0]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def _read_together(path: Path, models: Models) -> dict[Role, SavedModel]:
    """The first rank reads the headers, which are the same for all."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [{role: SavedModel.of(path / role) for role in models}]
        except CheckpointError as error:
            found = [error]
    dist.broadcast_object_list(found, src=0)
    (saved,) = found
    if isinstance(saved, CheckpointError):
        raise saved
    return saved


def _facts(trained: ShardedTrainedModel, state: OptimizerState, layout: Mapping[str, int]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "updates": trained.updates,
        "initial_weights": trained.initial_weights,
        "frozen_weights": trained.frozen_weights,
        "optimizer": state.facts(),
        "layout": dict(layout),
    }


def _model_tensors(trained: ShardedTrainedModel) -> dict[str, Tensor]:
    """Trained weights, tied ones once, and persistent buffers: the very tensors of the model."""
    buffers: dict[str, Tensor] = {}
    for prefix, module in trained.model.causal.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{prefix}.{name}" if prefix else name] = buffer
    return {name: parameter.detach() for name, parameter in trained.parameters.items()} | buffers
