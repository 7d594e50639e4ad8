"""Digests of sharded weights, equal to those that one process makes of the whole model.

A digest looks at a few values of each tensor. Every rank puts in those that it holds, and one exchange brings them
together: no tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spurline.model.pieces import held_box
from spurline.model.weights import digest_of_samples, sample, sampled_positions


def frozen_digest(module: nn.Module) -> str:
    """Digest of the parameters that need no gradient. A collective."""
    return _digest({name: value for name, value in module.named_parameters() if not value.requires_grad})


def weights_digest(module: nn.Module) -> str:
    """Digest of all parameters, whether they need gradients or not. A collective."""
    return _digest(dict(module.named_parameters()))


def _digest(parameters: Mapping[str, Tensor]) -> str:
    held = {name: _held(value.detach()) for name, value in parameters.items()}
    if not held:
        return digest_of_samples([])
    # As bytes, of which the largest is that of the rank that has the value: all others put in zeros.
    sizes = [values.nbytes for values in held.values()]
    joined = torch.cat([values.view(torch.uint8) for values in held.values()])
    dist.all_reduce(joined, dist.ReduceOp.MAX)
    parts = dict(zip(held, joined.split(sizes), strict=True))
    return digest_of_samples((name, value, parts[name].clone().view(value.dtype)) for name, value in parameters.items())


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
