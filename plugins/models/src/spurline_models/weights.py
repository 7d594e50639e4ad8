"""A model's weights under their Hugging Face names, for export and publishing, and digests that recognise weights.

`NamedWeights` knows which tensors of a model become which weights; it only reads, and adapters are merged into copies.
The tensors may be the model's own or, where a model is divided among ranks, gathered ones. A digest stands in a
checkpoint for weights that it does not hold: those under adapters, and those a run started from. Names, shapes and
dtypes count in full, values by blocks from all over each tensor: quick for large models, and every fine-tuned or
re-seeded model differs in them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from spurline.errors import CheckpointError
from spurline_models.placement.quantized_weights import QuantizedLinear, quantized_layers

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


@dataclass(frozen=True)
class WeightPart:
    """One weight of the model without adapters.

    name: its name there. sources: the tensors it is made of, by their names in the model's state dict: itself, or the
    weight under an adapter and the adapter's. layer: name of the layer that carries the adapter, if there is one.
    """

    name: str
    sources: tuple[str, ...]
    layer: str | None = None


@dataclass(frozen=True)
class WeightGroup:
    """Parts that leave the model together: one, or those of a layer that have other names or shapes in files.

    weights: what they become, Hugging Face name -> tensor on device `meta` with the shape and the dtype.
    """

    parts: tuple[WeightPart, ...]
    weights: Mapping[str, Tensor]

    @property
    def sources(self) -> list[str]:
        return [source for part in self.parts for source in part.sources]

    @property
    def is_merged(self) -> bool:
        """Whether adapters are merged, which wants the precision of the model, not that of the files."""
        return any(part.layer is not None for part in self.parts)


class GroupedWeights(Protocol):
    """What leaves a model, in groups that leave together, so that a divided model can be gathered group by group."""

    @property
    def groups(self) -> Sequence[WeightGroup]:
        """All groups, in the order in which they leave."""
        ...

    @property
    def layout(self) -> Mapping[str, Tensor]:
        """Every weight that leaves, by its name in files, as a tensor on device `meta`."""
        ...

    def weights_of(self, group: WeightGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a group. tensors: its sources, whole, on one device; the weights may share their memory."""
        ...


class NamedWeights:
    """How the tensors of this model become weights under Hugging Face names: every one once, tied ones too.

    adapted: whether the model carries LoRA adapters. read: gives the tensor that has the values of one of the model's
    own, where these may be elsewhere.
    """

    def __init__(
        self, causal: PreTrainedModel, *, adapted: bool, read: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ):
        self._causal = causal
        self._read = read
        self.tensors: Mapping[str, Tensor] = causal.state_dict(keep_vars=True)
        """The model's own, by their names in it."""
        self._quantized: Mapping[str, QuantizedLinear] = quantized_layers(causal)
        self._layers: Mapping[str, BaseTunerLayer] = {}
        if adapted:
            from spurline_models.adapters.lora import adapted_layers

            self._layers = dict(adapted_layers(causal))
        self.groups: Sequence[WeightGroup] = self._grouped(list(self._parts()))

    @property
    def layout(self) -> dict[str, Tensor]:
        """Every weight, as a tensor on device `meta`."""
        return {name: tensor for group in self.groups for name, tensor in group.weights.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor), made of the model's own tensors, which must all be here."""
        for group in self.groups:
            yield from self.weights_of(group, {source: self._value(source) for source in group.sources}).items()

    def weights_of(self, group: WeightGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a group. tensors: its sources, whole, on one device; the weights may share their memory."""
        return revert_weight_conversion(self._causal, {part.name: self._whole(part, tensors) for part in group.parts})

    def _value(self, source: str) -> Tensor:
        """The model's own tensor; of a quantized one the values that it stands for."""
        layer = self._quantized.get(source)
        return self._read(self.tensors[source]) if layer is None else layer.held(self._read).values(layer.wide_dtype)

    def _whole(self, part: WeightPart, tensors: Mapping[str, Tensor]) -> Tensor:
        if part.layer is None:
            (source,) = part.sources
            return tensors[source].detach()
        from spurline_models.adapters.lora import merged_weight

        own = {source.removeprefix(f"{part.layer}."): tensors[source].detach() for source in part.sources}
        return merged_weight(self._layers[part.layer], part.sources[0].removeprefix(f"{part.layer}."), own)

    def _parts(self) -> Iterator[WeightPart]:
        merged = {adapted_name(path, layer): path for path, layer in self._layers.items()}
        adapters: dict[str, list[str]] = {path: [] for path in self._layers}
        names: dict[str, str] = {}
        seen: set[int] = set()
        for source, tensor in self.tensors.items():
            path = self._layer_of_adapter(source)
            if path is not None:
                adapters[path].append(source)
            elif id(tensor) not in seen:
                seen.add(id(tensor))
                names[source] = without_adapters(source) if self._layers else source
        for source, name in names.items():
            layer = merged.pop(name, None)
            yield WeightPart(name, (source, *adapters.get(layer or "", ())), layer)
        assert not merged, f"adapters without the weight they adapt: {merged}"

    def _layer_of_adapter(self, source: str) -> str | None:
        """The layer whose adapter this tensor is a part of. Layers may lie in each other: one for each weight."""
        paths = [path for path in self._layers if source.startswith(f"{path}.")]
        innermost = max(paths, key=len, default=None)
        if innermost is None or source.removeprefix(f"{innermost}.").startswith("base_layer."):
            return None
        return innermost

    def _grouped(self, parts: Sequence[WeightPart]) -> list[WeightGroup]:
        # Since version 5 transformers renames and fuses some weights when it loads them; what leaves has file names.
        shapes = {part.name: self._shape(part) for part in parts}
        weights = revert_weight_conversion(self._causal, dict(shapes))
        groups: dict[str, list[WeightPart]] = {}
        for part in parts:
            is_kept = part.name in weights and weights[part.name].shape == shapes[part.name].shape
            groups.setdefault(part.name if is_kept else layer_of(part.name), []).append(part)
        return [
            WeightGroup(
                tuple(own), revert_weight_conversion(self._causal, {part.name: shapes[part.name] for part in own})
            )
            for own in groups.values()
        ]

    def _shape(self, part: WeightPart) -> Tensor:
        """The part on device `meta`; a merged weight has the higher precision of what it is made of."""
        first, *others = part.sources
        layer = self._quantized.get(first)
        plain = self.tensors[first]
        shape, dtype = (plain.shape, plain.dtype) if layer is None else (layer.held().shape, layer.wide_dtype)
        for source in others:
            dtype = torch.promote_types(dtype, self.tensors[source].dtype)
        return torch.empty(shape, dtype=dtype, device="meta")


def layer_of(name: str) -> str:
    """The layer that a name is of, as far as its number: `model.layers.3.`; empty for what is outside of layers."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1]) + "."


_BLOCKS = 16
_BLOCK_VALUES = 128


def frozen_digest(module: nn.Module, wide: torch.dtype | None = None) -> str:
    """Digest of the parameters that need no gradient. wide: dtype that all count as, however they are held."""
    return _digest((item for item in _held(module) if not item[1].requires_grad), wide)


def weights_digest(module: nn.Module, wide: torch.dtype | None = None) -> str:
    """Digest of all parameters, whether they need gradients or not."""
    return _digest(_held(module), wide)


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All parameters; of quantized ones the codes and all that gives them a value."""
    quantized = quantized_layers(module)
    for name, parameter in module.named_parameters():
        if name in quantized:
            yield from quantized[name].held().named(name)
        else:
            yield name, parameter


def without_adapters(name: str) -> str:
    """The name of a weight in the model before adapters were put around it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def adapted_name(path: str, layer: BaseTunerLayer) -> str:
    """The weight that an adapted layer adapts, by its name in the model without adapters. path: of the layer."""
    return f"{without_adapters(path)}.{getattr(layer, 'parameter_name', 'weight')}"


def check_initial_weights(found: str, expected: str, path: str) -> None:
    """Raise CheckpointError unless a reference model, loaded again from `path`, has the digest that the run began with.

    Checkpoints hold a digest of these weights, not the weights.
    """
    if found != expected:
        raise CheckpointError(
            f"model.path: the weights of {path} are not those this run started from, and its reference model is "
            "loaded from there. Restore them (and model.revision, where it names a branch, or backend.weights, where "
            "that was changed), or start anew with another run_dir."
        )


def _digest(parameters: Iterable[tuple[str, Tensor]], wide: torch.dtype | None) -> str:
    """The same on every device."""
    return digest_of_samples(entry(name, parameter, wide) for name, parameter in parameters)


def entry(name: str, tensor: Tensor, wide: torch.dtype | None) -> tuple[str, Tensor, Tensor]:
    """What `digest_of_samples` sees of a tensor. wide: as of `frozen_digest`."""
    return name, torch.empty(tensor.shape, dtype=wide or tensor.dtype, device="meta"), sample(tensor).to(wide)


def sample(tensor: Tensor) -> Tensor:
    """What a digest looks at: the tensor's values at `sampled_positions`."""
    values = tensor.detach().reshape(-1)
    return values[sampled_positions(values.numel()).to(values.device)]


def sampled_positions(num_values: int) -> Tensor:
    """Positions among so many values: all of a few, else blocks spread evenly from the first to the last."""
    if num_values <= _BLOCKS * _BLOCK_VALUES:
        return torch.arange(num_values)
    starts = torch.arange(_BLOCKS) * (num_values - _BLOCK_VALUES) // (_BLOCKS - 1)
    return (starts[:, None] + torch.arange(_BLOCK_VALUES)).view(-1)


def digest_of_samples(samples: Iterable[tuple[str, Tensor, Tensor]]) -> str:
    """Hex digest of (name, tensor, its `sample`), in any order. Of the tensor, shape and dtype count."""
    entries: dict[str, bytes] = {}
    for name, tensor, values in samples:
        head = f"{name} {list(tensor.shape)} {tensor.dtype}\0".encode()
        entries[name] = head + values.cpu().view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256()
    for name in sorted(entries):
        digest.update(entries[name])
    return digest.hexdigest()
