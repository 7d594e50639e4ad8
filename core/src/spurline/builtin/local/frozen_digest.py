"""Recognise weights that a checkpoint does not hold: those under adapters, and those a run started from.

Place on the way: parameters -> digest -> `state.json`. Names, shapes and dtypes count in full, values by blocks from
all over each tensor: quick for large models, and every fine-tuned or re-seeded model differs in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_BLOCKS = 16
_BLOCK_VALUES = 128


def frozen_digest(module: nn.Module) -> str:
    """Digest of the parameters that need no gradient."""
    return _digest(item for item in module.named_parameters() if not item[1].requires_grad)


def weights_digest(module: nn.Module) -> str:
    """Digest of all parameters, whether they need gradients or not."""
    return _digest(module.named_parameters())


def _digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Hex digest; the same on every device."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters, key=lambda item: item[0]):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}\0".encode())
        digest.update(_sample(parameter.detach()).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """All values of a small tensor, else blocks spread evenly from its first value to its last."""
    values = tensor.contiguous().view(-1)
    if values.numel() <= _BLOCKS * _BLOCK_VALUES:
        return values
    starts = [block * (values.numel() - _BLOCK_VALUES) // (_BLOCKS - 1) for block in range(_BLOCKS)]
    return torch.cat([values[start : start + _BLOCK_VALUES] for start in starts])
