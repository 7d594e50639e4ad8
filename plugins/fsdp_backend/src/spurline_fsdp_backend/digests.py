"""Digests of sharded weights, equal to those that one process makes of the whole model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spurline_models.weights import sample, sampled_positions
from spurline_ranks.checkpoint import digest_of_ranks
from spurline_ranks.pieces import held_box


def frozen_digest(module: nn.Module) -> str:
    """Return the digest of the parameters that need no gradient. A collective."""
    return _digest({name: value for name, value in module.named_parameters() if not value.requires_grad})


def weights_digest(module: nn.Module) -> str:
    """Return the digest of all parameters, whether they need gradients or not. A collective."""
    return _digest(dict(module.named_parameters()))


def _digest(parameters: Mapping[str, Tensor]) -> str:
    return digest_of_ranks(parameters, {name: _held(value.detach()) for name, value in parameters.items()})


def _held(value: Tensor) -> Tensor:
    """The sampled values of a tensor, and 0 for those that other ranks hold."""
    if not isinstance(value, DTensor):
        return sample(value)
    positions = sampled_positions(value.numel())
    local = value.to_local()
    box = held_box(value)
    places = torch.stack(torch.unravel_index(positions, value.shape)) - torch.tensor(box.offset)[:, None]
    mine = ((places >= 0) & (places < torch.tensor(box.shape)[:, None])).all(0)
    found = torch.zeros(len(positions), dtype=value.dtype, device=local.device)
    found[mine.to(local.device)] = local[tuple(places[:, mine].to(local.device))]
    return found
