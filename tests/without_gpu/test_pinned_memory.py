"""Host memory that is kept for transfers to a GPU is pinned exactly, and released with its tensor."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline_models.device_profile import DeviceProfile

PAGE = 4096


class Cuda:
    """Pins pages as CUDA does: no page twice. pinned: bytes by address."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 0
        pages = {page for at, used in self.pinned.items() for page in range(at // PAGE, (at + used - 1) // PAGE + 1)}
        assert pages.isdisjoint(range(address // PAGE, (address + size - 1) // PAGE + 1))
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        mapped = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
        assert any(int(start, 16) <= address < int(end, 16) for start, end in mapped)
        del self.pinned[address]
        return 0


def test_kept_memory_is_pinned_exactly_and_released_with_its_last_view(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda: Any = Cuda()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: pytest.fail(str(code)) if code else None)
    profile = DeviceProfile(torch.device("cuda", 0), torch.float32, None)
    shapes = [(3, 1000), (5,), (), (129, 257)]
    tensors = [profile.pinned_exactly(shape, torch.bfloat16).fill_(number) for number, shape in enumerate(shapes)]
    assert [tensor.shape for tensor in tensors] == list(shapes)
    assert list(cuda.pinned.values()) == [tensor.nbytes for tensor in tensors]
    assert [float(tensor.float().mean()) for tensor in tensors] == [0, 1, 2, 3]
    view = tensors[0][1:]
    del tensors
    gc.collect()
    assert list(cuda.pinned.values()) == [6000]
    assert float(view.float().sum()) == 0
    del view
    gc.collect()
    assert not cuda.pinned
    assert profile.pinned_exactly((0, 4), torch.float32).shape == (0, 4)
