"""A model's weights under their Hugging Face names, for export and publishing, and digests that recognise weights.

`named_weights` only reads; adapters are merged into copies. A digest stands in a checkpoint for weights that it does
not hold: those under adapters, and those a run started from. Names, shapes and dtypes count in full, values by blocks
from all over each tensor: quick for large models, and every fine-tuned or re-seeded model differs in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def named_weights(causal: PreTrainedModel, adapted: bool) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, adapters merged. adapted: whether the model carries LoRA adapters."""
    layers = {}
    if adapted:
        from spurline.model.lora import adapted_layers, merged_weight

        layers = dict(adapted_layers(causal))
    whole: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in causal.state_dict(keep_vars=True).items():
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if layer is not None:
            part = name.removeprefix(f"{layer}.")
            if not part.startswith("base_layer.") or part == "base_layer.weight":
                continue  # an adapter, or the weight it is merged into below
            name = f"{layer}.{part.removeprefix('base_layer.')}"
        if id(tensor) not in seen:
            seen.add(id(tensor))
            whole[name] = tensor.detach()
    # Since version 5 transformers renames and fuses some weights when it loads them; what leaves here has file names.
    yield from revert_weight_conversion(causal, whole).items()
    for name, layer in layers.items():
        merged = merged_weight(layer).detach()
        yield from revert_weight_conversion(causal, {f"{name}.weight": merged}).items()


_BLOCKS = 16
_BLOCK_VALUES = 128


def frozen_digest(module: nn.Module) -> str:
    """Digest of the parameters that need no gradient."""
    return _digest(item for item in module.named_parameters() if not item[1].requires_grad)


def weights_digest(module: nn.Module) -> str:
    """Digest of all parameters, whether they need gradients or not."""
    return _digest(module.named_parameters())


def _digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Hex digest; the same on every device."""
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters, key=lambda item: item[0]):
        digest.update(f"{name} {list(parameter.shape)} {parameter.dtype}\0".encode())
        digest.update(_sample(parameter.detach()).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _sample(tensor: Tensor) -> Tensor:
    """All values of a small tensor, else blocks spread evenly from its first value to its last."""
    values = tensor.contiguous().view(-1)
    if values.numel() <= _BLOCKS * _BLOCK_VALUES:
        return values
    starts = [block * (values.numel() - _BLOCK_VALUES) // (_BLOCKS - 1) for block in range(_BLOCKS)]
    return torch.cat([values[start : start + _BLOCK_VALUES] for start in starts])
