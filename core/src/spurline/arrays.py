"""Turn what callers hand over (lists, numpy arrays, tensors) into plain numpy arrays, once, at the border.

Imports no torch: a tensor is recognised by its methods, so that plain-data modules may use this.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray


def as_array(values: Any, dtype: DTypeLike) -> NDArray[Any]:
    """`values` as a numpy array of `dtype`; an array that already is one is returned as it is.

    Tensors are detached and moved to the CPU first; bfloat16, which numpy does not know, goes through float32.
    """
    if isinstance(values, np.ndarray):
        return np.asarray(values, dtype=dtype)
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.asarray(values, dtype=dtype)
