"""Read the policy's weights out of a checkpoint in one process, without ranks: for `spurline export` on any machine.

Place on the way: pieces of all ranks -> one whole tensor after the other -> weights under Hugging Face names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest
from spurline_megatron_backend.checkpoint import SavedModel
from spurline_models.weight_files import WeightStream


def read_weights(run: RunConfig, folder: Path, digests: Mapping[str, FileDigest]) -> WeightStream:
    """See `BackendFacts.checkpoint_reader`."""
    return SavedModel.read_policy(run, folder, digests, lora=None, frozen_dtype=torch.float32)
