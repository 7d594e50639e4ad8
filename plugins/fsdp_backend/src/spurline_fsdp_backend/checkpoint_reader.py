"""Read the policy's weights out of a checkpoint in one process, without ranks: for `spurline export` on any machine.

Place on the way: pieces of all ranks -> one whole tensor after the other -> weights under Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest, verify_files
from spurline.model.pieces import Box
from spurline.model.saved_weights import SavedTensors, saved_weights
from spurline.model.weight_files import WeightStream, stored_dtype
from spurline_fsdp_backend.checkpoint import SavedModel
from spurline_fsdp_backend.configs import FsdpBackendConfig

_POLICY = "policy"


def read_weights(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> WeightStream:
    """See `BackendConfig.checkpoint_reader`. The optimizer's values are verified too: they lie in the same files."""
    lora = cast(FsdpBackendConfig, run.backend).lora
    verify_files(folder, {name: digest for name, digest in digests.items() if name.startswith(f"{_POLICY}/")})
    model = SavedModel.of(folder / _POLICY)
    tensors = model.index.tensors

    def read(name: str) -> Tensor:
        return model.index.read(name, Box.whole(tensors[name].shape))

    saved = SavedTensors(
        folder / _POLICY,
        {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in model.weights},
        read,
        model.facts["frozen_weights"],
        torch.float32 if lora is None else stored_dtype(run.model),
    )
    return saved_weights(saved, run.model, lora, run.seed)
