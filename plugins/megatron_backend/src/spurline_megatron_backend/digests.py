"""Digests of Megatron's parameters, equal to those that one process makes of the Hugging Face model.

Place on the way: parameters of a rank -> the sampled values of Hugging Face tensors among them -> one exchange.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.parts import HeldParameter, Part, whole_shapes
from spurline_models.weights import sampled_positions
from spurline_ranks.checkpoint import digest_of_ranks


def weights_digest(
    architecture: Architecture,
    held: Sequence[tuple[HeldParameter, Tensor]],
    device: torch.device,
    *,
    critic: bool = False,
) -> str:
    """Return the digest of the model that all ranks hold together. A collective.

    held: this rank's parameters, whose values count as float32, wherever they lie. device: which ranks exchange from.
    critic: whether the model has a value head.
    """
    shapes = whole_shapes(architecture, critic=critic)
    positions = {name: sampled_positions(_meta(shape).numel()) for name, shape in shapes.items()}
    found = {name: torch.zeros(len(sampled), device=device) for name, sampled in positions.items()}
    for parameter, values in held:
        flat = values.detach().reshape(-1)
        for part in parameter.parts:
            _put(found[part.name], part, flat, positions[part.name])
    return digest_of_ranks({name: _meta(shape) for name, shape in shapes.items()}, found)


def _put(found: Tensor, part: Part, flat: Tensor, positions: Tensor) -> None:
    """The sampled values that are in this part of a flattened parameter."""
    box = part.box
    places = torch.stack(torch.unravel_index(positions, part.shape)) - torch.tensor(box.offset)[:, None]
    mine = ((places >= 0) & (places < torch.tensor(box.shape)[:, None])).all(0)
    strides = torch.tensor(_meta(box.shape).stride())
    sources = part.begin + (places[:, mine] * strides[:, None]).sum(0)
    found[mine.to(found.device)] = flat[sources.to(flat.device)].to(found.device, torch.float32)


def _meta(shape: Iterable[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=torch.float32, device="meta")
