"""Read a model's adapter: its settings, and its tensors under their names in PEFT's files.

Engines that take adapters get the tensors, or a folder that `PeftModel.from_pretrained` loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from spurline_models.weights import GroupedWeights, WeightGroup, WeightPart

SETTINGS_FILE = "adapter_config.json"


@dataclass(frozen=True)
class AdapterStream:
    """An adapter, one tensor at a time.

    Attributes:
        settings: The content of `adapter_config.json`.
        tensors: Pairs (name, tensor), the content of `adapter_model.safetensors`.
    """

    settings: Mapping[str, Any]
    tensors: Iterator[tuple[str, Tensor]]


class AdapterWeights(GroupedWeights):
    """The tensors of an adapter under their names in PEFT's files. Each group has one tensor."""

    def __init__(self, causal: PreTrainedModel) -> None:
        from spurline_models.adapters.lora import ADAPTER, adapter_parameters

        tensors: dict[str, Tensor] = {}
        groups: list[WeightGroup] = []
        for layer, part, parameter in adapter_parameters(causal):
            # Names in PEFT's files begin with `base_model.model.` and leave out the adapter's name. PEFT inserts the
            # adapter's name when it loads the file.
            leaf = ".".join(piece for piece in part.split(".") if piece != ADAPTER)
            source, name = f"{layer}.{part}", f"base_model.model.{layer}.{leaf}"
            tensors[source] = parameter
            shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            groups.append(WeightGroup((WeightPart(name, (source,)),), {name: shape}))
        self.tensors, self.groups = tensors, groups

    def weights_of(self, group: WeightGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {part.name: tensors[source].detach() for part in group.parts for source in part.sources}


def write_adapter_files(folder: Path, adapter: AdapterStream) -> None:
    """Write an adapter into this folder so that `PeftModel.from_pretrained` loads it. Raises OSError."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors}
    try:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        # safetensors raises this error for a full disk too.
        raise OSError(str(error)) from error
    # Write the settings last, so that a folder with settings always has its tensors.
    text = json.dumps(dict(adapter.settings), indent=2, sort_keys=True)
    (folder / SETTINGS_FILE).write_text(text + "\n", encoding="utf-8")
