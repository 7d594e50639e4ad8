"""Keep a float64 model in float64.

Hugging Face models round to float32 inside norms, softmax and rotary tables, whatever dtype the weights have. A float64
test would then rest on 1e-16 differences never crossing a float32 rounding boundary, which they do now and then. Active
only with `precision: fp64`, which is for numerical tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class KeepDouble(TorchFunctionMode):
    """Turn every conversion to float32 into one to float64, in forward and in recomputation."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif func is torch.Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
