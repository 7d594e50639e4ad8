"""Weight sync `disk`: send weights as safetensors files, in a folder that trainer and engines share.

The file of a bucket is removed when all engines have read it. Files of a killed run are removed by the next publish.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from spurline.errors import RunFailedError
from spurline.files import remove
from spurline_async_rl.weights.buckets import BucketSync
from spurline_async_rl.weights.configs import DiskSyncConfig
from spurline_models.weight_buckets import TensorPlace, WeightBucket

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


_PREFIX = "spurline-weights-"


class DiskSync(BucketSync):
    """A `WeightSync` that writes each bucket into a file."""

    transport = "disk"
    maker = f"{__name__}:FileMaker"

    def __init__(self, config: DiskSyncConfig, run: RunConfig | None = None) -> None:
        super().__init__(config, run)
        folder = config.folder or (run and run.run_dir / "weights")
        assert folder is not None, "neither a folder nor a run directory"
        self._folder = Path(folder).absolute()

    def maker_settings(self) -> dict[str, Any]:
        return {"folder": str(self._folder)}

    def close(self) -> None:
        """Remove all files, because a maker in another process may have been killed."""
        super().close()
        if self._folder.is_dir():
            _remove_files(self._folder)


class FileMaker:
    """A `BucketMaker` that has one file at a time."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._path: Path | None = None

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        self.taken()
        held = list(weights)
        self._path = path = self._folder / f"{_PREFIX}{version}-{number}.safetensors"
        # Tied weights share memory, which the format does not allow.
        copies = {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in held}
        try:
            if number == 1:
                self._folder.mkdir(parents=True, exist_ok=True)
                _remove_files(self._folder)
            save_file(copies, path.with_suffix(".tmp"))
            os.replace(path.with_suffix(".tmp"), path)
        except OSError as error:
            raise RunFailedError(f"{path}: the weights cannot be written: {error}.") from error
        places = tuple(TensorPlace.of(name, tensor) for name, tensor in held)
        return WeightBucket(DiskSync.transport, places, {"path": str(path)})

    def taken(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    close = taken


def read_file(bucket: WeightBucket) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights. Raises RunFailedError if the bucket's file is missing."""
    path = Path(bucket.where["path"])
    if not path.is_file():
        raise RunFailedError(
            f"{path}: no such file here. Set source.weight_sync.folder to a folder that trainer and engines share."
        )
    with safe_open(path, "pt") as file:  # pyright: ignore[reportUnknownVariableType, reportNoOverloadImplementation]
        for place in bucket.places:
            yield place.name, file.get_tensor(place.name)


def _remove_files(folder: Path) -> None:
    for path in folder.glob(f"{_PREFIX}*"):
        remove(path)
