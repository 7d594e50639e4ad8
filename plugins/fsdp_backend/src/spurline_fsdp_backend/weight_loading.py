"""Fill a sharded model with weights. Each rank reads its own values from the files.

If there are no safetensors files, or with `init: random`, the first rank loads the whole model and sends each rank its
shards, tensor by tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline_models.architecture import ScalarHead
from spurline_models.device_profile import device_profile
from spurline_models.loading import check_loaded, load_model, quiet_loading, read_into
from spurline_models.weight_files import safetensors_files, slices_of


def load_weights(causal: PreTrainedModel, model: ModelConfig, seed: int, device: Literal["cpu", "cuda"]) -> None:
    """Give values to all parameters and buffers of a sharded model on the meta device. This is a collective.

    The head of a critic, or a score head that is not in the files, begins with zeros.

    Raises ModelError if the files do not fit.
    """
    files = [] if model.init == "random" else safetensors_files(model)
    if files:
        _read_parts(causal, model, files, device)
    else:
        _hand_out(causal, model, seed, device)
    left = [name for name, value in (*causal.named_parameters(), *causal.named_buffers()) if value.is_meta]
    assert not left, f"without values: {left}"


def _read_parts(causal: PreTrainedModel, model: ModelConfig, files: list[Path], device: str) -> None:
    own = _scalar_head(causal)
    with quiet_loading():
        slices = slices_of(files)
        head = own and f"{own[0]}.weight"
        if head and model.head == "vocabulary":
            slices.pop(head, None)
        # This keeps transformers from changing sharded parameters.
        causal._is_distributed_loading_by_transformers = True
        found, loading = read_into(causal, slices, device)
        if own and head in found.missing_keys:
            own[1].to_empty(device=device)
            nn.init.zeros_(own[1].weight)
            found.missing_keys -= {head}
            own[1].weight._is_hf_initialized = True  # type: ignore[attr-defined]
        tied = set(getattr(causal, "all_tied_weights_keys", None) or {})
        check_loaded(model, found.missing_keys - tied, found.mismatched_keys, found.unexpected_keys)
        type(causal)._finalize_model_loading(causal, loading, found)


def _hand_out(causal: PreTrainedModel, model: ModelConfig, seed: int, device: str) -> None:
    """Load the whole model on the host of the first rank, and send each rank its shards."""
    whole: dict[str, Tensor] = {}
    if dist.get_rank() == 0:
        loaded = load_model(model, device_profile("cpu"), seed)
        whole = {**dict(loaded.named_parameters()), **dict(loaded.named_buffers())}
    causal.to_empty(device=device)
    own = _scalar_head(causal) if model.head == "vocabulary" else None
    for name, value in (*causal.named_parameters(), *causal.named_buffers()):
        if own and name == f"{own[0]}.weight":
            nn.init.zeros_(value)
            continue
        full = torch.empty(value.shape, dtype=value.dtype, device=device)
        if whole:
            full.copy_(whole[name].detach())
        with torch.no_grad():
            if isinstance(value, DTensor):
                value.copy_(distribute_tensor(full, value.device_mesh, value.placements))
            else:
                dist.broadcast(full, src=0)
                value.copy_(full)


def _scalar_head(causal: PreTrainedModel) -> tuple[str, ScalarHead] | None:
    return next(((name, module) for name, module in causal.named_modules() if isinstance(module, ScalarHead)), None)
