"""Digests of weights that are divided among ranks, equal to those that one process makes of the whole model.

A digest looks at a few values of each tensor. Every rank puts in those that it holds, and one exchange brings them
together: no tensor is gathered.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from spurline_models.weights import digest_of_samples


def digest_of_ranks(tensors: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> str:
    """Return the `digest_of_samples` of the whole tensors. A collective.

    Args:
        tensors: Whole ones by name, for shape and dtype only; the same on all ranks, in the same order.
        held: The sampled values of each, 0 where this rank does not hold them, on the device that ranks exchange from.
    """
    if not tensors:
        return digest_of_samples([])
    # The largest byte over all ranks is that of the rank that has the value, since all others put in zeros.
    found = [held[name] for name in tensors]
    joined = torch.cat([values.view(torch.uint8) for values in found])
    dist.all_reduce(joined, dist.ReduceOp.MAX)
    parts = joined.split([values.nbytes for values in found])
    return digest_of_samples(
        (name, tensor, part.clone().view(tensor.dtype))
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    )
