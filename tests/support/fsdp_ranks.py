"""Ranks of the FSDP backend that lose a checkpoint while they read it, or whose model can be made to mix tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch.distributed as dist

from spurline_fsdp_backend import sharded_model
from spurline_fsdp_backend.rank import FsdpRank
from spurline_fsdp_backend.trained_model import SavedModel
from spurline_models.architecture import decoder_layers
from spurline_models.device_profile import device_profile
from spurline_ranks.checkpoint import StoredModel
from spurline_ranks.group import Place


def losing_files(saved: type[StoredModel]) -> Any:
    """Return this class, but the files of a checkpoint are gone once their headers were read and found fitting."""

    def read_fitting(path: Path, models: Mapping[Any, Any]) -> Any:
        found = saved.read_fitting(path, models)
        dist.barrier()
        if dist.get_rank() == 0:
            for file in path.rglob("*.safetensors"):
                file.unlink()
        dist.barrier()
        return found

    return SimpleNamespace(read_fitting=read_fitting)


class LosingRank(FsdpRank):
    _saved_model = losing_files(SavedModel)


class MixingRank(FsdpRank):
    def __init__(self, place: Place, plain_run: Mapping[str, Any]) -> None:
        super().__init__(place, plain_run, total_updates=8)

    def check(self, mixes: float, precision: Literal["fp32", "bf16"]) -> None:
        """Run the start-up checks of the model, with a layer that adds this share of each token's neighbour."""
        model = self._policy.model
        [layer, *_] = decoder_layers(model.causal)
        handle = layer.register_forward_hook(lambda module, arguments, output: output + mixes * output.roll(1, dims=1))
        config, profile = self._config.model_copy(update={"precision": precision}), device_profile("cpu", precision)
        try:
            # `check_exactness` would refuse the model first: some neighbours are of other sequences.
            with mock.patch.object(sharded_model, "check_exactness"):
                sharded_model.check_sharded(model, config, profile, "mixing")
        finally:
            handle.remove()
