"""Describe the device and precision of a model's computation. Code that depends on them uses a `DeviceProfile`.

This module also seeds, saves and restores the random generators of training.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import random
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.attention
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spurline.errors import ConfigError
from spurline_models.machine import memory_bytes

_SLOTS_PER_CALL = {"cpu": 32, "cuda": 1024}
"""The measured number of padding tokens that cost as much time as one attention call, by type of device."""


@dataclass(frozen=True)
class DeviceProfile:
    """The device of the weights, their dtype (fp32 or fp64), and the dtype of autocast (bf16 or None)."""

    device: torch.device
    weight_dtype: torch.dtype = torch.float32
    autocast_dtype: torch.dtype | None = None

    @property
    def computes_in(self) -> torch.dtype:
        return self.autocast_dtype or self.weight_dtype

    @property
    def slots_per_attention_call(self) -> int:
        return _SLOTS_PER_CALL.get(self.device.type, 0)

    @property
    def process_group(self) -> str:
        """The backends of `torch.distributed` for tensors on the host and on the device."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    def computing(self) -> AbstractContextManager[object]:
        """Return the context in which every forward pass runs."""
        if self.autocast_dtype is not None:
            return torch.autocast(self.device.type, self.autocast_dtype)
        return self.computing_exactly()

    def computing_exactly(self) -> AbstractContextManager[object]:
        """Return the context for a forward pass in the dtype of the weights, without autocast."""
        return KeepDouble() if self.weight_dtype == torch.float64 else nullcontext()

    def checkpoint_options(self) -> dict[str, Any]:
        """Return keywords for torch's `checkpoint`, so that recomputation restores `KeepDouble` as well as autocast."""
        options: dict[str, Any] = {"use_reentrant": False}
        if self.weight_dtype == torch.float64:
            options["context_fn"] = lambda: (nullcontext(), KeepDouble())
        return options

    def use_fastest_attention(self) -> None:
        """Let torch compute flash attention by FlashAttention 3 in this process, if `has_flash_attention_3`.

        Raises ConfigError if it is installed but cannot be loaded.
        """
        if self.device.type != "cuda" or not has_flash_attention_3(torch.cuda.get_device_capability(self.device)):
            return
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
        except (ImportError, OSError, RuntimeError) as error:
            raise ConfigError.at(
                "backend.kernels",
                f"would use FlashAttention 3, which is installed but does not load: {error}. Install it for torch "
                f"{torch.__version__}, remove it, or set kernels: none.",
            ) from error

    def use_deterministic_kernels(self) -> None:
        """Let every kernel of this process give equal bits for equal inputs. On a CPU, all kernels already do."""
        if self.device.type == "cuda":
            # Matrix products are deterministic only if their workspace has a fixed size.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)

    def keeping_generators(self) -> AbstractContextManager[object]:
        """Return a context that restores the states of torch's random generators at its end."""
        return torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])

    def send(self, tensor: Tensor) -> Tensor:
        """Send a host tensor to the device, without waiting for the device."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def take(self, tensor: Tensor, index: Tensor) -> Tensor:
        """Return `tensor[index]` in host memory that `send` need not copy."""
        # `KeepDouble` would change a dtype that is named.
        out = tensor.new_empty((len(index), *tensor.shape[1:]), pin_memory=self.device.type == "cuda")
        return torch.index_select(tensor, 0, index, out=out)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return uninitialised host memory. For a GPU it is pinned, and torch rounds its size up to a power of two."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self.device.type == "cuda")

    def pinned_exactly(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory like `pinned`, without rounding. It is slower to get, and meant to be kept."""
        if self.device.type == "cpu" or 0 in shape:
            return torch.empty(tuple(shape), dtype=dtype)
        count = math.prod(shape)
        # Pages of its own, since CUDA does not pin a page twice. The array lets go of them after its finalizer has run.
        pages = np.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=np.uint8)
        tensor = torch.frombuffer(pages, dtype=dtype, count=count).view(tuple(shape))
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        weakref.finalize(pages, _unpin, cudart, tensor.data_ptr()).atexit = False
        return tensor

    def fetch(self, tensor: Tensor, place: torch.device) -> Tensor:
        """Return the tensor itself if it is on `place`, or else a copy on the host. Waits for the copy."""
        if tensor.device == place:
            return tensor
        return self.pinned(tensor.shape, tensor.dtype).copy_(tensor)

    def synchronize(self) -> None:
        """Wait until the device has finished its work, so that time can be measured."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"CPU ({platform.machine()})"

    def memory(self) -> tuple[int, int] | None:
        """Return the free and the total bytes of a GPU, or None on CPU."""
        return torch.cuda.mem_get_info(self.device) if self.device.type == "cuda" else None

    def release_cached_memory(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def fused_on_gpus(function: Callable[..., None], device: torch.device) -> Callable[..., None]:
    """Return a function of tensors [N] on the device. On a GPU, torch.compile fuses its operations."""
    return _compiled(function) if device.type == "cuda" else function


@cache
def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    return torch.compile(function, dynamic=True, fullgraph=True)


def _unpin(cudart: Any, address: int) -> None:
    torch.cuda.check_error(cudart.cudaHostUnregister(address))


def device_profile(
    device: Literal["auto", "cpu", "cuda"] = "auto",
    precision: Literal["fp32", "bf16", "fp64"] = "fp32",
    *,
    setting: str = "backend.device",
) -> DeviceProfile:
    """Return the profile.

    Raises:
        ConfigError: If `device` is `cuda` and there is no GPU, which names `setting`, or if the GPU cannot use bf16.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise ConfigError.at(setting, "needs a GPU, but torch sees none. Check `nvidia-smi`, or set device: cpu.")
    name = "cuda" if available and device != "cpu" else "cpu"
    if name == "cuda" and precision == "bf16" and torch.cuda.get_device_capability() < (8, 0):
        problem = "is bf16, which GPUs older than Ampere compute slowly or not at all. Set precision: fp32."
        raise ConfigError.at(setting.replace("device", "precision"), problem)
    return DeviceProfile(
        device=torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name),
        weight_dtype=torch.float64 if precision == "fp64" else torch.float32,
        autocast_dtype=torch.bfloat16 if precision == "bf16" else None,
    )


def has_flash_attention_3(capability: tuple[int, int]) -> bool:
    """Return whether torch can use FlashAttention 3 on GPUs of this compute capability, and it is installed."""
    can_activate = hasattr(torch.nn.attention, "activate_flash_attention_impl")
    return capability[0] == 9 and can_activate and find_spec("flash_attn_interface") is not None


def attention_library() -> str:
    """Return torch's name of the library that computes flash attention, such as `FA3`, or "" if torch itself does."""
    return getattr(torch.nn.attention, "current_flash_attention_impl", str)() or ""


def device_bytes(device: Literal["auto", "cpu", "cuda"]) -> int:
    """Return the memory of the smallest GPU that this process sees, or of the machine if it trains on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return memory_bytes()
    return min(torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count()))


class KeepDouble(TorchFunctionMode):
    """A mode for `precision: fp64` that replaces every conversion to float32 by a conversion to float64.

    Hugging Face models convert to float32 in norms, softmax and rotary tables. Rounding to float32 may turn a
    difference of 1e-16 into a much larger difference.
    """

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


def seed_generators(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def generator_tensors() -> dict[str, Tensor]:
    """Return the states of torch's generators: `cpu`, and `cuda:0`, ... for every GPU of this process."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def generator_values() -> dict[str, Any]:
    """Return the states of Python's and numpy's global generators as JSON. Model code may use these generators."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def restore_generators(states: dict[str, Tensor], values: dict[str, Any]) -> None:
    """Restore the results of `generator_tensors` and `generator_values`. GPUs without a saved state are left alone."""
    torch.set_rng_state(states["cpu"])
    for index in range(torch.cuda.device_count()):
        if f"cuda:{index}" in states:
            torch.cuda.set_rng_state(states[f"cuda:{index}"], index)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = values["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
