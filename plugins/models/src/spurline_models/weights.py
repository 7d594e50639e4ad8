"""Give a model's weights their Hugging Face names for export and publishing, and identify weights by digests.

A checkpoint contains a digest of the frozen weights instead of the weights themselves. The digest covers all names,
shapes and dtypes, and a sample of each tensor's values. Computing it takes little time even for a large model. Any
fine-tuning changes the digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from spurline.config.run_config import ModelConfig
from spurline.errors import CheckpointError
from spurline.protocols.backend import Role
from spurline_models.placement.quantized_weights import QuantizedLinear, quantized_layers

if TYPE_CHECKING:
    from peft.tuners.tuners_utils import BaseTunerLayer


@dataclass(frozen=True)
class WeightPart:
    """A weight of the model, with its adapter if it has one.

    Attributes:
        name: The name that the weight has in a model without adapters.
        sources: State dict names of the tensors that the weight is computed from. For an adapted weight, these are the
            base weight and the adapter's matrices.
        layer: Name of the layer that carries the adapter, if there is one.
    """

    name: str
    sources: tuple[str, ...]
    layer: str | None = None


@dataclass(frozen=True)
class WeightGroup:
    """Parts that are converted together: a single part, or all parts of a layer that are renamed or reshaped.

    `weights` is the result of the conversion: tensors on device `meta` by Hugging Face name.
    """

    parts: tuple[WeightPart, ...]
    weights: Mapping[str, Tensor]

    @property
    def sources(self) -> list[str]:
        return [source for part in self.parts for source in part.sources]

    @property
    def is_merged(self) -> bool:
        """True if adapters are merged into these weights. Merging needs the full precision of the model."""
        return any(part.layer is not None for part in self.parts)


class GroupedWeights:
    """The weights of a model in groups, so that a sharded model can be gathered and converted group by group.

    Attributes:
        tensors: The tensors of the model by state dict name.
        groups: The groups in the order of export.
    """

    tensors: Mapping[str, Tensor]
    groups: Sequence[WeightGroup]

    @property
    def layout(self) -> dict[str, Tensor]:
        """All weights by their names in files, on device `meta`."""
        return {name: tensor for group in self.groups for name, tensor in group.weights.items()}

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) of each weight."""
        for group in self.groups:
            yield from self.weights_of(group, {source: self.value(source) for source in group.sources}).items()

    def value(self, source: str) -> Tensor:
        """Return a tensor of the model. A quantized weight is converted back to floating point."""
        return self.tensors[source]

    def weights_of(self, group: WeightGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the group's weights by Hugging Face name, made of unsharded `tensors`, whose memory they may share."""
        raise NotImplementedError


class NamedWeights(GroupedWeights):
    """The weights of a model under their Hugging Face names. Tied weights appear once, and adapters are merged.

    `adapted` says whether the model has LoRA adapters. `read(tensor)` returns a tensor of the model unchanged, or a
    copy of that tensor on the host while engines use its memory.
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

    def weights_of(self, group: WeightGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return revert_weight_conversion(self._causal, {part.name: self._whole(part, tensors) for part in group.parts})

    def value(self, source: str) -> Tensor:
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
        # Paths of the adapted layers, by the names that their weights have in a model without adapters.
        merged = {
            f"{without_adapters(path)}.{getattr(layer, 'parameter_name', 'weight')}": path
            for path, layer in self._layers.items()
        }
        adapters: dict[str, list[str]] = {path: [] for path in self._layers}
        if self._layers:
            from spurline_models.adapters.lora import adapter_parameters

            for path, part, _ in adapter_parameters(self._causal):
                adapters[path].append(f"{path}.{part}")
        of_adapters = {source for sources in adapters.values() for source in sources}
        seen: set[int] = set()
        for source, tensor in self.tensors.items():
            if source not in of_adapters and id(tensor) not in seen:
                seen.add(id(tensor))
                name = without_adapters(source) if self._layers else source
                layer = merged.pop(name, None)
                yield WeightPart(name, (source, *adapters.get(layer or "", ())), layer)
        assert not merged, f"adapters without the weight they adapt: {merged}"

    def _grouped(self, parts: Sequence[WeightPart]) -> list[WeightGroup]:
        # transformers renames and fuses some weights when it loads them. `revert_weight_conversion` undoes this.
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
        """Return the part on device `meta`. A merged weight has the highest precision of its sources."""
        first, *others = part.sources
        layer = self._quantized.get(first)
        plain = self.tensors[first]
        shape, dtype = (plain.shape, plain.dtype) if layer is None else (layer.held().shape, layer.wide_dtype)
        for source in others:
            dtype = torch.promote_types(dtype, self.tensors[source].dtype)
        return torch.empty(shape, dtype=dtype, device="meta")


def layer_of(name: str) -> str:
    """Return a name up to its layer's number, such as `model.layers.3.`, or an empty string if it has no number."""
    parts = name.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return "" if number is None else ".".join(parts[: number + 1]) + "."


_BLOCKS = 16
_BLOCK_VALUES = 128


def weights_digest(module: nn.Module, wide: torch.dtype | None = None, *, only_frozen: bool = False) -> str:
    """Return the digest of all parameters, or of the frozen parameters only, cast to the dtype `wide` if given."""
    quantized = quantized_layers(module)
    held: list[tuple[str, Tensor]] = []
    for name, parameter in module.named_parameters():
        if name in quantized:
            held += quantized[name].held().named(name)
        elif not (only_frozen and parameter.requires_grad):
            held.append((name, parameter))
    return digest_of_samples(entry(*item, wide) for item in held)


def without_adapters(name: str) -> str:
    """Return the name that a weight has in a model without adapters."""
    return ".".join(part for part in name.split(".") if part != "base_layer")


class PinnedWeights:
    """Digests of the weights that a run uses and does not train, so that it never goes on with other weights.

    `initial` is the digest of the weights that the run started from, which are those of the default reference.
    `frozen` has the digests of `model.frozen`, by role, from the first use of each model on. A resumed run reads both
    from the checkpoint.
    """

    def __init__(self, initial: str, frozen: Mapping[str, str] | None = None) -> None:
        self.initial = initial
        self.frozen = dict(frozen or {})

    def facts(self) -> dict[str, Any]:
        """Return the digests as JSON values, for a checkpoint."""
        return {"initial_weights": self.initial, "frozen_models": dict(self.frozen)}

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Return the digests in a checkpoint's facts."""
        return cls(str(facts["initial_weights"]), facts.get("frozen_models"))

    def check(self, role: Role, found: str, model: ModelConfig) -> None:
        """Raise CheckpointError if the digest of this role's weights is not that of its earlier use in the run.

        `model` is the model that the run trains.
        """
        if role in model.frozen:
            what, key, path = "was used in this run before", f"frozen.{role}", model.frozen[role].path
            expected = self.frozen.setdefault(role, found)
        else:
            what, key, path, expected = "this run started from", "", model.path, self.initial
        if found != expected:
            key = f"model.{key}".removesuffix(".")
            raise CheckpointError(
                f"{key}.path: the {role} model needs the weights that {what}, but the weights of {path} differ. "
                f"Restore the old files, and set {key}.revision and the dtypes of the backend as they were, or start "
                "over with another run_dir."
            )


def entry(name: str, tensor: Tensor, wide: torch.dtype | None) -> tuple[str, Tensor, Tensor]:
    """Return (name, tensor on `meta` with shape and dtype, sampled values), cast to the dtype `wide` if it is given."""
    values = tensor.detach().reshape(-1)
    sample = values[sampled_positions(values.numel()).to(values.device)].to(wide)
    return name, torch.empty(tensor.shape, dtype=wide or tensor.dtype, device="meta"), sample


def sampled_positions(num_values: int) -> Tensor:
    """Return the positions of the values that a digest covers: all of a small tensor, or blocks spread evenly."""
    if num_values <= _BLOCKS * _BLOCK_VALUES:
        return torch.arange(num_values)
    starts = torch.arange(_BLOCKS) * (num_values - _BLOCK_VALUES) // (_BLOCKS - 1)
    return (starts[:, None] + torch.arange(_BLOCK_VALUES)).view(-1)


def digest_of_samples(samples: Iterable[tuple[str, Tensor, Tensor]]) -> str:
    """Return the hex digest of the results of `entry`. Their order has no effect."""
    entries: dict[str, bytes] = {}
    for name, tensor, values in samples:
        head = f"{name} {list(tensor.shape)} {tensor.dtype}\0".encode()
        entries[name] = head + values.cpu().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(b"".join(entries[name] for name in sorted(entries))).hexdigest()
