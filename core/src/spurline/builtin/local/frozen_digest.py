"""Recognise the weights that training leaves alone, which a checkpoint of adapters does not hold.

Place on the way: frozen parameters -> digest -> `state.json`. Names, shapes and dtypes count in full, values by blocks
from all over each tensor: quick for large models, and every fine-tuned or re-seeded model differs in them.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

_BLOCKS = 16
_BLOCK_VALUES = 128


def frozen_digest(module: nn.Module) -> str:
    """Hex digest of the parameters that need no gradient; the same on every device."""
    digest = hashlib.sha256()
    for name, parameter in sorted(module.named_parameters()):
        if not parameter.requires_grad:
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
