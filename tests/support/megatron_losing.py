"""A rank of the Megatron backend that loses a checkpoint while it reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

from spurline.protocols.backend import Role
from spurline_megatron_backend import open_rank
from spurline_megatron_backend.checkpoint import Models, SavedModel, read_fitting
from spurline_ranks.group import Place


def open_losing_rank(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> Any:
    rank = open_rank.open_rank(place, plain_run, total_updates)
    load = rank.load

    def load_and_lose(path: str) -> Any:
        with mock.patch("spurline_megatron_backend.rank.read_fitting", _read_and_lose):
            return load(path)

    rank.load = load_and_lose
    return rank


def _read_and_lose(path: Path, models: Models) -> Mapping[Role, SavedModel]:
    """What headers say, of files that are gone when values are asked for."""
    saved = read_fitting(path, models)
    dist.barrier()
    if dist.get_rank() == 0:
        for file in path.rglob("*.safetensors"):
            file.unlink()
    dist.barrier()
    return saved
