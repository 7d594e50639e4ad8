"""Check a checkpoint, and read a trained model's weights from it one by one, without having the whole model in memory.

Trained weights come from the checkpoint. Frozen weights come from `model.path`, and their digest is checked. An adapter
can be read without the base weights. Facts about the model, such as its update count, are in `state.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.digests import FileDigest, HashedFile
from spurline.errors import CheckpointError, DamagedCheckpointError
from spurline_models.adapters.adapter_weights import AdapterStream, AdapterWeights
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.configs import LoraConfig
from spurline_models.device_profile import device_profile
from spurline_models.loading import joined_weights, load_model
from spurline_models.machine import return_freed_memory
from spurline_models.optimizers.groups import freeze_parameters
from spurline_models.optimizers.state import describe
from spurline_models.placement.narrow_weights import quantizable_modules
from spurline_models.placement.quantized_weights import QuantizedWeight
from spurline_models.weight_files import WeightStream, safetensors_files, slices_of
from spurline_models.weights import NamedWeights, digest_of_samples, entry, layer_of

_FACTS = "state.json"


def write_facts(folder: Path, facts: Mapping[str, Any]) -> dict[str, FileDigest]:
    """Write JSON values to the disk, and return {file name: digest}. Raises OSError."""
    with HashedFile(folder / _FACTS) as file:
        file.write(json.dumps(facts).encode())
    return {_FACTS: file.digest}


def read_facts(folder: Path, backend: str, layout: object) -> dict[str, Any]:
    """Read the JSON values that `write_facts` wrote. `layout` is the `format` that facts of this backend must have.

    Raises:
        CheckpointError: If another backend or version wrote the checkpoint, or it is damaged.
    """
    path = folder / _FACTS
    reason = "is missing"
    if path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise damaged(path, error) from error
        found = content.get("format") if isinstance(content, dict) else None
        if found == layout:
            return content
        reason = f"has format {found}, and {layout} is needed"
    raise CheckpointError(
        f"{path} {reason}: this is not a checkpoint of backend '{backend}' in this version. Resume with the backend "
        "and version that wrote it. Or export it with `spurline export` and its config, and set model.path to the "
        "result."
    )


def damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    """Return the error for a file of a checkpoint that cannot be read."""
    return DamagedCheckpointError(f"{path}: missing or damaged ({error}). Resume from another checkpoint.")


def check_weights(where: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the checkpoint has the weights that the run trains, with equal descriptions.

    Both mappings contain the result of `describe` for each weight, keyed by name.
    """
    missing, foreign = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or foreign:
        raise CheckpointError(
            f"{where}: the checkpoint holds other weights than this run trains: {_some('missing', missing)}"
            f"{_some('not in the model', foreign)}Resume with the model and backend.lora the checkpoint was made with."
        )
    for name, description in wanted.items():
        if saved[name] != description:
            raise CheckpointError(
                f"{where}: {name} is {saved[name]} in the checkpoint, but {description} in this run. Resume with the "
                "model, backend.lora and backend.precision the checkpoint was made with."
            )


def check_frozen(where: Path, saved: str, frozen: str) -> None:
    """Raise CheckpointError unless the digest of the run's frozen weights equals the saved digest."""
    if saved != frozen:
        raise CheckpointError(
            f"{where}: the run of this checkpoint had other frozen weights than this run. Resume with the "
            "model.path, model.revision, model.init, backend.lora.base_dtype, backend.weights and seed the checkpoint "
            "was made with."
        )


def _some(label: str, names: list[str]) -> str:
    return f"{len(names)} {label} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). " if names else ""


@dataclass(frozen=True)
class SavedTensors:
    """The tensors of a model in a checkpoint: trained weights and persistent buffers.

    Attributes:
        where: The folder, for errors.
        layout: The tensors by their names in the model, on device `meta`.
        read: A function that returns the tensor with a given name, on CPU.
        frozen_weights: Digest of the frozen weights.
        frozen_dtype: Dtype of frozen weights in digests.
        rounded_to: Dtype to which frozen weights were rounded, or None.
        is_quantized: Whether the frozen weights of linear layers were quantized.
        narrow: Names of weights that were rounded to bf16.
    """

    where: Path
    layout: Mapping[str, Tensor]
    read: Callable[[str], Tensor]
    frozen_weights: str
    frozen_dtype: torch.dtype
    rounded_to: torch.dtype | None = None
    is_quantized: bool = False
    narrow: Collection[str] = ()


def saved_weights(saved: SavedTensors, model: ModelConfig, lora: LoraConfig | None, seed: int) -> WeightStream:
    """Return every weight of the saved model, with merged adapters. The stream reads one weight at a time.

    Raises:
        CheckpointError: If the checkpoint is of another model. The stream also raises it, after the last weight, if
            `model.path` does not have the frozen weights of the run.
    """
    causal = _without_values(model, saved.frozen_dtype)
    freeze_parameters(causal, model.freeze)
    quantized = {f"{name}.weight" for name, _ in quantizable_modules(causal)} if saved.is_quantized else set[str]()
    if lora is not None:
        from spurline_models.adapters.lora import add_adapters

        add_adapters(causal, lora, seed)
    named = NamedWeights(causal, adapted=lora is not None)
    frozen = {name for name, value in causal.named_parameters() if not value.requires_grad}
    wanted = [source for group in named.groups for source in group.sources if source not in frozen]
    descriptions = {name: describe(named.tensors[name]) for name in wanted}
    check_weights(saved.where, {name: describe(value) for name, value in saved.layout.items()}, descriptions)
    return WeightStream(named.layout, _weights(saved, named, frozen, quantized, model, seed))


def saved_adapter(saved: SavedTensors, model: ModelConfig, lora: LoraConfig, seed: int) -> AdapterStream:
    """Return the adapter of the saved model, without reading the base weights.

    Raises:
        CheckpointError: If the checkpoint is of another model.
    """
    from spurline_models.adapters.lora import adapter_settings, add_adapters

    causal = _without_values(model, saved.frozen_dtype)
    add_adapters(causal, lora, seed)
    adapter = AdapterWeights(causal)
    # The checkpoint also has the model's buffers.
    buffers = {name for name, _ in causal.named_buffers()}
    found = {name: describe(value) for name, value in saved.layout.items() if name not in buffers}
    check_weights(saved.where, found, {name: describe(value) for name, value in adapter.tensors.items()})
    tensors = (
        item
        for group in adapter.groups
        for item in adapter.weights_of(group, {source: saved.read(source) for source in group.sources}).items()
    )
    return AdapterStream(adapter_settings(causal, model), tensors)


def _without_values(model: ModelConfig, dtype: torch.dtype) -> PreTrainedModel:
    causal = build_without_memory(load_model_config(model), model)
    nn.Module.to(causal, dtype=dtype)
    return causal


def _weights(
    saved: SavedTensors,
    named: NamedWeights,
    frozen: Collection[str],
    quantized: Collection[str],
    model: ModelConfig,
    seed: int,
) -> Iterator[tuple[str, Tensor]]:
    original = _OriginalWeights(model, seed, saved) if frozen else None
    samples: list[tuple[str, Tensor, Tensor]] = []
    for group in named.groups:
        tensors: dict[str, Tensor] = {}
        for part in group.parts:
            for source in part.sources:
                if source in frozen:
                    assert original is not None
                    value = original.read(part.name, named.tensors[source].shape)
                    held = [(source, value)]
                    if part.name in quantized:
                        weight = QuantizedWeight.of(value)
                        value, held = weight.values(value.dtype), list(weight.named(source))
                    tensors[source] = value
                    samples += [entry(*item, saved.frozen_dtype) for item in held]
                else:
                    tensors[source] = saved.read(source)
        yield from named.weights_of(group, tensors).items()
        tensors.clear()
        return_freed_memory()
    if frozen:
        check_frozen(saved.where, saved.frozen_weights, digest_of_samples(samples))


class _OriginalWeights:
    """A reader of the weights of `model.path`, one layer at a time. Names are as in the model without adapters.

    With `init: random`, all weights are made at once.
    """

    def __init__(self, model: ModelConfig, seed: int, saved: SavedTensors):
        self._causal = _without_values(model, saved.frozen_dtype)
        self._saved = saved
        self._slices: dict[str, dict[str, Any]] = {}
        self._layer: str | None = None
        self._weights: dict[str, Tensor] = {}
        paths = [] if model.init == "random" else safetensors_files(model)
        for key, part in slices_of(paths).items():
            self._slices.setdefault(_number_of(key), {})[key] = part
        if not paths:
            self._weights = load_model(model, device_profile("cpu"), seed).state_dict()

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """Return the weight of this name on CPU. Raises CheckpointError if it is missing or has another shape."""
        layer = _number_of(name)
        if self._slices and self._layer != layer:
            self._weights.clear()
            self._layer = layer
            self._weights = joined_weights(self._causal, self._slices.get(layer, {}))
        found = self._weights.get(name)
        if found is None or found.shape != shape:
            there = "none" if found is None else f"one of shape {list(found.shape)}"
            raise CheckpointError(
                f"model.path: the checkpoint needs a frozen weight {name} of shape {list(shape)}, and the files have "
                f"{there}. Restore the model that the run was made with."
            )
        rounded_to = torch.bfloat16 if name in self._saved.narrow else self._saved.rounded_to
        return found.to(rounded_to).to(self._saved.frozen_dtype)


def _number_of(name: str) -> str:
    """Return the number of a weight's layer as text, or "". A weight has the same number in files and in the model."""
    return layer_of(name).rstrip(".").rpartition(".")[2]
