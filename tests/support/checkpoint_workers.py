"""A rank of the FSDP backend that loses a checkpoint while it reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import torch.distributed as dist

from spurline.errors import CheckpointError
from spurline.protocols.backend import Role
from spurline_fsdp_backend.checkpoint import Models, SavedModel, read_fitting
from spurline_fsdp_backend.rank import FsdpRank


class LosingRank(FsdpRank):
    def load(self, path: str) -> CheckpointError | None:
        with mock.patch("spurline_fsdp_backend.rank.read_fitting", _read_and_lose):
            return super().load(path)


def _read_and_lose(path: Path, models: Models) -> Mapping[Role, SavedModel]:
    """What headers say, of files that are gone when values are asked for."""
    saved = read_fitting(path, models)
    dist.barrier()
    if dist.get_rank() == 0:
        for file in path.rglob("*.safetensors"):
            file.unlink()
    dist.barrier()
    return saved
