"""A rank of the Megatron backend that loses a checkpoint while it reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from checkpoint_workers import lose_files

from spurline_megatron_backend import open_rank
from spurline_ranks.group import Place


def open_losing_rank(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> Any:
    rank: Any = open_rank.open_rank(place, plain_run, total_updates)
    read = rank._read_fitting
    rank._read_fitting = lambda path: lose_files(path, read(path))
    return rank
