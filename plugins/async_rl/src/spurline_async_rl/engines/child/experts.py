"""The experts chosen for some tokens as a part of a message between a child process and its parent.

They are many small numbers: as bytes in text they take a third of what JSON makes of them.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPE = np.dtype("<i2")


def to_plain(experts: NDArray[np.int16]) -> dict[str, Any]:
    """Choices [tokens, layers, top_k], as JSON can hold them."""
    packed = b64encode(np.ascontiguousarray(experts, _DTYPE).tobytes()).decode("ascii")
    return {"shape": list(experts.shape), "int16": packed}


def of_plain(plain: Mapping[str, Any]) -> NDArray[np.int16]:
    """The inverse of `to_plain`."""
    return np.frombuffer(b64decode(plain["int16"]), _DTYPE).astype(np.int16).reshape(plain["shape"])
