"""GPUs whose memory other processes can open, for machines that have none: files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from spurline_async_rl.weights.cuda_ipc import CurrentGpu, Handle, HandleMaker


class FileGpu(CurrentGpu):
    """What is exported is a copy; other processes see the same file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.device = torch.device("cpu")
        self.name = name
        self._folder = folder
        self._count = 0
        self.allocations = 0

    @contextmanager
    def allocating(self) -> Iterator[None]:
        self.allocations += 1
        yield

    def export(self, buffer: Tensor) -> Handle:
        self._count += 1
        # A buffer of its own for each bucket, which can be exported.
        assert self._count == self.allocations
        path = self._folder / f"{self.name}-{self._count}"
        path.write_bytes(buffer.numpy().tobytes())
        return {"path": str(path), "bytes": len(buffer)}

    def open(self, handle: Handle) -> Tensor:
        return torch.from_file(handle["path"], shared=True, size=handle["bytes"], dtype=torch.uint8)

    def release(self, handle: Handle) -> None:
        Path(handle["path"]).unlink()


class FileHandleMaker(HandleMaker):
    """Return a maker of `cuda_ipc` buckets with such a GPU."""

    def __init__(self, folder: str, sender: int = 0, senders: int = 1) -> None:
        super().__init__(sender, senders, FileGpu(Path(folder), f"GPU-{sender}"))
