"""Read the policy's weights out of a checkpoint in one process, without ranks: for `spurline export` on any machine.

Place on the way: pieces of all ranks -> one whole tensor after the other -> weights under Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch

from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest
from spurline_fsdp_backend.checkpoint import SavedModel
from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_models.adapters.adapter_weights import AdapterStream
from spurline_models.placement.narrow_weights import base_dtype
from spurline_models.weight_files import WeightStream


def read_weights(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> WeightStream:
    """See `BackendFacts.checkpoint_reader`."""
    lora = cast(FsdpBackendConfig, run.backend).lora
    dtype = torch.float32 if lora is None else base_dtype(lora, run.model)
    return SavedModel.read_policy(run, folder, digests, lora, dtype)


def read_adapter(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> AdapterStream:
    """See `BackendFacts.adapter_reader`."""
    lora = cast(FsdpBackendConfig, run.backend).lora
    assert lora is not None
    return SavedModel.read_adapter(run, folder, digests, lora)
