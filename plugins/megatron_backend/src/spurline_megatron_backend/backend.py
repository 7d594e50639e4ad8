"""The Megatron backend as the loop sees it: which rows each rank computes, and who answers for them."""

from __future__ import annotations

from typing import ClassVar, cast

from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_megatron_backend.grid import Grid
from spurline_ranks.backend import RankBackend


class MegatronBackend(RankBackend):
    """A `Backend`; see the protocol for what each method promises."""

    worker: ClassVar[str] = "spurline_megatron_backend.open_rank:open_rank"

    @property
    def _grid(self) -> Grid:
        return cast(MegatronBackendConfig, self._config).grid

    def _share_of(self, rank: int) -> int:
        return self._grid.place(rank).data

    def _counts(self, rank: int) -> bool:
        return self._grid.speaks(rank)
