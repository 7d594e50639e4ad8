"""Write the values of this rank's optimizer, and read them on any number of ranks, with any division of the model.

`spurline_ranks.checkpoint` defines the format. Tensors have the names and shapes of the Hugging Face model. A rank's
optimizer holds ranges of flattened parameters. The module `parts` maps these ranges to boxes (slices) of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest
from spurline.errors import CheckpointError, CheckpointWriteError
from spurline.protocols.backend import Role
from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import Part, whole_shapes
from spurline_megatron_backend.weight_gathering import Held
from spurline_models.optimizers.state import OptimizerState, changed_groups, check_state, describe, is_plain, unsaveable
from spurline_models.saved_weights import saved_weights
from spurline_models.weight_files import WeightStream
from spurline_models.weights import digest_of_samples
from spurline_ranks.checkpoint import StoredModel, digest_of_ranks
from spurline_ranks.pieces import Box, Piece, PieceIndex

if TYPE_CHECKING:
    from spurline_megatron_backend.trained_model import Owned, TrainedModel

_NOTHING_FROZEN = digest_of_samples([])

Models = Mapping[Role, "TrainedModel"]


def save(path: Path, models: Models, grid: Grid) -> dict[str, FileDigest]:
    """Write this rank's part into the folder, and return the digests of the written files. This is a collective."""
    rank = dist.get_rank()
    digests: dict[str, FileDigest] = {}
    tensor_rank = grid.place(rank).tensor
    own: dict[Role, Sequence[Owned]] = {
        role: [it for it in trained.owned() if it.held.counts_on(tensor_rank)] for role, trained in models.items()
    }
    # Ranks communicate only here. If a rank fails later, no other rank waits for it.
    states = _joined_states(own, models)
    for role, trained in models.items():
        facts = None
        if states is not None:
            facts = {
                "updates": trained.updates,
                **trained.pinned.facts(),
                "frozen_weights": _NOTHING_FROZEN,
                "weights": list(trained.shapes),
                "optimizer": states[role].facts(),
                "layout": asdict(grid),
            }
        digests |= SavedModel.write(path / role, rank, facts, pieces(own[role]))
    return digests


class SavedModel(StoredModel):
    """A model in a checkpoint of this backend."""

    backend = "megatron"

    def check(self, trained: TrainedModel) -> None:
        weights = {name: describe(torch.empty(shape, device="meta")) for name, shape in trained.shapes.items()}

        def check_optimizer(saved: OptimizerState) -> None:
            check_state(saved, trained.recipe.config.name, trained.shapes, trained.made)
            for key, tensor in saved.tensors.items():
                if tensor.numel() != 1 and tensor.shape != trained.shapes[key.rpartition("/")[0]]:
                    raise CheckpointError(
                        f"optimizer state {key} is {describe(tensor)}, but its weight has a different shape. Resume "
                        "with the optimizer of the checkpoint."
                    )

        self.check_fits(weights, _NOTHING_FROZEN, check_optimizer)

    def put_into(self, trained: TrainedModel) -> None:
        """Read this rank's ranges into the optimizer, and copy them into the model. This is a collective."""
        state = OptimizerState.read(self.optimizer_shapes, self.facts["optimizer"])
        with torch.no_grad():
            read_owned(self.index, state, trained.owned())
        changed = state.groups or [{} for _ in trained.made]
        for group, before, values in zip(trained.optimizer.param_groups, trained.made, changed, strict=True):
            group.update({**before, **values})
        trained.fill_from_owned()


def pieces(own: Sequence[Owned]) -> Iterator[Piece]:
    """Yield the parts of Hugging Face tensors in these ranges, as views of the optimizer's own memory.

    Optimizer state that is a single number for a tensor belongs to the range with the tensor's first value.
    """
    for owned in own:
        vectors = {"": owned.values} | {f"/{key}": it for key, it in owned.state.items() if _is_vector(it, owned)}
        for part, low, high in _common(owned):
            begin = owned.span[0]
            for suffix, vector in vectors.items():
                values = vector.detach()[low - begin : high - begin]
                span = low - part.begin, high - part.begin
                yield Piece(part.name + suffix, part.shape, part.box, values, span)
            if _is_first(part, low):
                for key, value in owned.state.items():
                    if isinstance(value, Tensor) and not _is_vector(value, owned):
                        yield Piece(f"{part.name}/{key}", tuple(value.shape), Box.whole(value.shape), value.detach())


def state_of(own: Sequence[Owned], name: str) -> OptimizerState:
    """Collect facts about the optimizer's state, for each tensor whose first value is in these ranges.

    Raises:
        CheckpointWriteError: If a checkpoint cannot hold the state of the optimizer with this `name`.
    """
    shapes: dict[str, str] = {}
    values: dict[str, Any] = {}
    on_host: list[str] = []
    for owned in own:
        firsts = [part for part, low, _ in _common(owned) if _is_first(part, low)]
        for key, value in owned.state.items():
            _check_kept(name, key, value, owned)
            for part in firsts:
                place = f"{part.name}/{key}"
                if not isinstance(value, Tensor):
                    values[place] = value
                    continue
                shape = part.shape if _is_vector(value, owned) else value.shape
                shapes[place] = describe(torch.empty(shape, dtype=value.dtype, device="meta"))
                if value.device.type == "cpu" and owned.values.device.type != "cpu":
                    on_host.append(place)
    return OptimizerState({}, name, values, shapes=shapes, on_host=tuple(on_host))


def read_owned(index: PieceIndex, saved: OptimizerState, own: Sequence[Owned]) -> None:
    """Fill these ranges and their optimizer state with saved values."""
    on_host = set(saved.on_host)
    keys: dict[str, list[str]] = {}
    for place in [*saved.tensors, *saved.values]:
        name, _, key = place.rpartition("/")
        keys.setdefault(name, []).append(key)
    for owned in own:
        owned.values.copy_(_read_vector(index, owned, ""))
        owned.state.clear()
        parts = [part for part, _, _ in _common(owned)] or owned.held.parts
        if not parts:  # only padding
            continue
        # All tensors in a range have the same keys, so the keys of the first tensor are enough.
        name = parts[0].name
        for key in keys.get(name, ()):
            place = f"{name}/{key}"
            if place in saved.values:
                owned.state[key] = saved.values[place]
                continue
            device = torch.device("cpu") if place in on_host else owned.values.device
            stored = index.tensors[place]
            is_vector = stored.shape == index.tensors[name].shape
            found = _read_vector(index, owned, f"/{key}") if is_vector else index.read(place, Box.whole(stored.shape))
            owned.state[key] = found.to(device)


def _read_vector(index: PieceIndex, owned: Owned, suffix: str) -> Tensor:
    """Read the values of a range onto the CPU. `suffix` is added to the tensor names. Padding becomes 0."""
    begin, end = owned.span
    found: Tensor | None = None
    for part, low, high in _common(owned):
        values = index.read_span(part.name + suffix, part.box, low - part.begin, high - part.begin)
        if found is None:
            found = values.new_zeros(end - begin)
        found[low - begin : high - begin] = values
    return torch.zeros(end - begin) if found is None else found


def _common(owned: Owned) -> Iterator[tuple[Part, int, int]]:
    """Yield (part, begin, end) of each part in the range. `begin` and `end` index the flattened parameter."""
    begin, end = owned.span
    for part in owned.held.parts:
        low, high = max(begin, part.begin), min(end, part.end)
        if low < high:
            yield part, low, high


def _is_first(part: Part, begin: int) -> bool:
    """Return whether the value at `begin` of a flattened parameter is the first of its tensor."""
    return begin == part.begin and not any(part.box.offset)


def _is_vector(value: object, owned: Owned) -> bool:
    return isinstance(value, Tensor) and value.shape == owned.values.shape


def _check_kept(name: str, key: object, value: object, owned: Owned) -> None:
    what = owned.held.parts[0].name if owned.held.parts else "padding"
    if not isinstance(key, str) or "/" in key:
        raise unsaveable(name, f"state of {what} under the key {key!r}, which must be a string without '/',", value)
    if not (is_plain(value) or _is_vector(value, owned) or (isinstance(value, Tensor) and value.numel() == 1)):
        raise unsaveable(name, f"`{key}` of {what}", value)


def _joined_states(own: Mapping[Role, Sequence[Owned]], models: Models) -> Mapping[Role, OptimizerState] | None:
    """Join each optimizer's facts on the first rank, which raises the error of any rank. This is a collective."""
    mine: Mapping[Role, OptimizerState] | CheckpointWriteError
    try:
        mine = {
            role: replace(
                state_of(own[role], trained.recipe.config.name),
                groups=changed_groups(trained.recipe.config.name, trained.optimizer, trained.made),
            )
            for role, trained in models.items()
        }
    except CheckpointWriteError as error:
        mine = error
    found: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, found)
    failure = next((part for part in (mine, *(found or ())) if isinstance(part, CheckpointWriteError)), None)
    if failure is not None:
        raise failure
    return None if found is None else {role: join([part[role] for part in found]) for role in models}


def join(states: Sequence[OptimizerState]) -> OptimizerState:
    """Join the facts of all ranks. Raises CheckpointWriteError if their parameter groups differ."""
    if any(state.groups != states[0].groups for state in states):
        raise CheckpointWriteError(
            f"The parameter groups of optimizer '{states[0].optimizer}' have different values on different ranks. A "
            "checkpoint cannot hold them. Choose another optimizer, or backend fsdp."
        )
    values = {key: value for state in states for key, value in state.values.items()}
    shapes = {key: shape for state in states for key, shape in state.shapes.items()}
    on_host = tuple(key for state in states for key in state.on_host)
    return OptimizerState({}, states[0].optimizer, values, states[0].groups, shapes, on_host)


def read_weights(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> WeightStream:
    """Read the policy in one process, without ranks. See `BackendFacts.checkpoint_reader`."""
    return saved_weights(SavedModel.read_saved(folder, digests, torch.float32), run.model, None, run.seed)


def weights_digest(architecture: Architecture, held: Held, device: torch.device, *, critic: bool = False) -> str:
    """Return the digest of the whole model, which is the same for any number of ranks. This is a collective.

    Args:
        architecture: The model.
        held: The parameters of this rank with fp32 values, on any device.
        device: The device on which ranks exchange tensors.
        critic: Whether the model has a value head.
    """
    shapes = whole_shapes(architecture, critic=critic)
    whole = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in shapes.items()}
    boxes = (
        (part.name, part.box, values.detach().view(-1)[part.begin : part.end].view(part.box.shape))
        for parameter, values in held
        for part in parameter.parts
    )
    return digest_of_ranks(whole, boxes, device)
