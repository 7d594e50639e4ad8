"""The model's weights under their Hugging Face names, for export and for publishing to rollout engines.

Place on the way: trained model -> (name, tensor) one at a time -> a file or an engine. Reads only; adapters are
merged into copies. For exact resume there is `checkpoint.py`, which keeps adapters apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion


def named_weights(causal: PreTrainedModel, adapted: bool) -> Iterator[tuple[str, Tensor]]:
    """Every weight once, adapters merged. adapted: whether the model carries LoRA adapters."""
    layers = {}
    if adapted:
        from spurline.builtin.local.lora import adapted_layers, merged_weight

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
