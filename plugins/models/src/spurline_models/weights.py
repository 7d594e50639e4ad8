"""Give a model's weights their Hugging Face names, for export and publishing, and recognise weights by digests.

A checkpoint has a digest of the weights that it does not hold. The digest covers all names, shapes and dtypes, and
blocks of values from all over each tensor. It is quick for large models, and any fine-tuning changes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    """One weight of the model without adapters, by its name there.

    Attributes:
        sources: Names in the model's state dict of the tensors that make the weight: itself, or the weight under an
            adapter and the adapter's matrices.
        layer: Name of the layer that carries the adapter, if there is one.
    """

    name: str
    sources: tuple[str, ...]
    layer: str | None = None


@dataclass(frozen=True)
class WeightGroup:
    """Parts that leave the model together: one, or all parts of a layer that have other names or shapes in files.

    `weights` are the weights that the parts become: tensors on device `meta` by Hugging Face name.
    """

    parts: tuple[WeightPart, ...]
    weights: Mapping[str, Tensor]

    @property
    def sources(self) -> list[str]:
        return [source for part in self.parts for source in part.sources]

    @property
    def is_merged(self) -> bool:
        """True if adapters are merged, which needs the precision of the model."""
        return any(part.layer is not None for part in self.parts)


class GroupedWeights:
    """Weights of a model in groups that leave it together, so that a sharded model can be gathered group by group.

    Attributes:
        tensors: The model's own tensors, by their names in the model.
        groups: The groups in the order in which they leave.
    """

    tensors: Mapping[str, Tensor]
    groups: Sequence[WeightGroup]

    @property
    def layout(self) -> dict[str, Tensor]:
        """All weights by their names in files, on device `meta`."""
        return {name: tensor for group in self.groups for name, tensor in group.weights.items()}

    def weights_of(self, group: WeightGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights of a group, made of its whole `tensors`; memory may be shared."""
        raise NotImplementedError


class NamedWeights(GroupedWeights):
    """The weights of a model under their Hugging Face names, tied ones once. Adapters are merged into copies.

    Args:
        causal: The model.
        adapted: Whether the model carries LoRA adapters.
        read: Returns a tensor with the values of one of the model's own, whose memory may be given away.
    """

    def __init__(
        self, causal: PreTrainedModel, *, adapted: bool, read: Callable[[Tensor], Tensor] = lambda tensor: tensor
    ):
        self._causal = causal
        self._read = read
        self.tensors = causal.state_dict(keep_vars=True)
        self._quantized: Mapping[str, QuantizedLinear] = quantized_layers(causal)
        self._layers: Mapping[str, BaseTunerLayer] = {}
        if adapted:
            from spurline_models.adapters.lora import adapted_layers

            self._layers = dict(adapted_layers(causal))
        self.groups = self._grouped(list(self._parts()))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor), made of the model's own tensors."""
        for group in self.groups:
            yield from self.weights_of(group, {source: self._value(source) for source in group.sources}).items()

    def weights_of(self, group: WeightGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(self._causal, {part.name: self._whole(part, tensors) for part in group.parts})

    def _value(self, source: str) -> Tensor:
        """Return the model's own tensor, or the values of a quantized one."""
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
        # The adapted weights by their names in the model without adapters.
        merged = {
            f"{without_adapters(path)}.{getattr(layer, 'parameter_name', 'weight')}": path
            for path, layer in self._layers.items()
        }
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
        """Return the layer whose adapter has this tensor, the innermost if layers lie in each other."""
        paths = [path for path in self._layers if source.startswith(f"{path}.")]
        innermost = max(paths, key=len, default=None)
        if innermost is None or source.removeprefix(f"{innermost}.").startswith("base_layer."):
            return None
        return innermost

    def _grouped(self, parts: Sequence[WeightPart]) -> list[WeightGroup]:
        # transformers renames and fuses some weights when it loads them, which is undone here.
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
        """Return the part on device `meta`; a merged weight has the highest precision of its sources."""
        first, *others = part.sources
        layer = self._quantized.get(first)
        plain = self.tensors[first]
        shape, dtype = (plain.shape, plain.dtype) if layer is None else (layer.held().shape, layer.wide_dtype)
        for source in others:
            dtype = torch.promote_types(dtype, self.tensors[source].dtype)
        return torch.empty(shape, dtype=dtype, device="meta")


def layer_of(name: str) -> str:
    """Return the beginning of a name up to the layer's number, such as `model.layers.3.`; empty outside of layers."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1]) + "."


_BLOCKS = 16
_BLOCK_VALUES = 128


def frozen_digest(module: nn.Module, wide: torch.dtype | None = None) -> str:
    """Return the digest of the parameters that need no gradient, as if all had the dtype `wide`."""
    frozen = (item for item in _held(module) if not item[1].requires_grad)
    return digest_of_samples(entry(*item, wide) for item in frozen)


def weights_digest(module: nn.Module, wide: torch.dtype | None = None) -> str:
    """Return the digest of all parameters, as if all had the dtype `wide`."""
    return digest_of_samples(entry(*item, wide) for item in _held(module))


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters, and for quantized ones everything that gives them a value."""
    quantized = quantized_layers(module)
    for name, parameter in module.named_parameters():
        if name in quantized:
            yield from quantized[name].held().named(name)
        else:
            yield name, parameter


def without_adapters(name: str) -> str:
    """Return the name of a weight in the model before adapters were put around it."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


def check_initial_weights(found: str, expected: str, path: str) -> None:
    """Raise CheckpointError unless a reference model, loaded again from `path`, has the run's initial digest."""
    if found != expected:
        raise CheckpointError(
            f"model.path: the weights of {path} are not the ones that this run started from, and its reference model "
            "needs these. Restore them, model.revision and backend.weights, or start over with another run_dir."
        )


def entry(name: str, tensor: Tensor, wide: torch.dtype | None) -> tuple[str, Tensor, Tensor]:
    """Return a tensor as `digest_of_samples` takes it, as if it had the dtype `wide`."""
    return name, torch.empty(tensor.shape, dtype=wide or tensor.dtype, device="meta"), sample(tensor).to(wide)


def sample(tensor: Tensor) -> Tensor:
    """Return the values that a digest covers."""
    values = tensor.detach().reshape(-1)
    return values[sampled_positions(values.numel()).to(values.device)]


def sampled_positions(num_values: int) -> Tensor:
    """Return the positions of sampled values: all of a few, else blocks spread evenly from first to last."""
    if num_values <= _BLOCKS * _BLOCK_VALUES:
        return torch.arange(num_values)
    starts = torch.arange(_BLOCKS) * (num_values - _BLOCK_VALUES) // (_BLOCKS - 1)
    return (starts[:, None] + torch.arange(_BLOCK_VALUES)).view(-1)


def digest_of_samples(samples: Iterable[tuple[str, Tensor, Tensor]]) -> str:
    """Return the hex digest of (name, tensor, its `sample`), in any order; the tensor gives shape and dtype."""
    entries: dict[str, bytes] = {}
    for name, tensor, values in samples:
        head = f"{name} {list(tensor.shape)} {tensor.dtype}\0".encode()
        entries[name] = head + values.cpu().view(torch.uint8).numpy().tobytes()
    digest = hashlib.sha256()
    for name in sorted(entries):
        digest.update(entries[name])
    return digest.hexdigest()
