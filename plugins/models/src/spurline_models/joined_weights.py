"""Make weights of a model out of those that its files hold in another form, such as experts one by one.

Place on the way: weights under Hugging Face names -> this -> parameters. The other way round is `NamedWeights`. It is
transformers' own loading that converts them, into a model without memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from spurline_models.loading import quiet_loading


def joined_weights(causal: PreTrainedModel, weights: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    """Parameters by their names in the model, on CPU, those that can be made of these weights.

    causal: on device `meta`, and there again afterwards. weights: tensors, or slices of files, by their names in files.
    """
    mapping: Any = get_model_conversion_mapping(causal)
    loading = LoadStateDictConfig(dtype=dtype, weight_mapping=mapping, device_map={"": "cpu"})
    with quiet_loading():
        convert_and_load_state_dict_in_model(causal, dict(weights), loading)
    found = {name: value.detach() for name, value in causal.named_parameters() if not value.is_meta}
    nn.Module.to(causal, device="meta")
    return found
