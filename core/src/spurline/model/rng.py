"""The random generators that training draws from, seeded together and saved without pickle.

torch on CPU and on every GPU of this process as tensors; Python's `random` and numpy's legacy generator, which model
code may use, as JSON values.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generator_tensors() -> dict[str, Tensor]:
    """Generator states of torch: `cpu`, and `cuda:0`, ... where there are GPUs."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def restore_generator_tensors(states: dict[str, Tensor]) -> None:
    """Devices that are not in the saved state, or no longer there, keep their generators."""
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda:{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda:{index}"], index)


def generator_values() -> dict[str, Any]:
    """Generator states of Python and numpy as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def restore_generator_values(values: dict[str, Any]) -> None:
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
