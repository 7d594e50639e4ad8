"""Write published weights into an engine's own copy of the model, in place.

Data flow: backend -> weights under Hugging Face names, in any order and in parts -> the copy's parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from spurline.errors import RunFailedError, listing, suggestion
from spurline_models.loading import joined_weights
from spurline_models.weights import NamedWeights, WeightGroup


class WeightWriter:
    """Replaces every weight of a model in place, one after another. After an error some weights are old and some new.

    Some weights have another form in the model, such as joined experts. These are written once all parts have arrived.
    """

    def __init__(self, causal: PreTrainedModel):
        self._causal = causal
        self._named = NamedWeights(causal, adapted=False)
        own = {tensor.untyped_storage().data_ptr() for tensor in self._named.tensors.values()}
        self._targets: dict[str, Tensor] = {}
        self._groups: dict[str, WeightGroup] = {}
        for group in self._named.groups:
            weights = self._named.weights_of(group, self._named.tensors)
            if all(weight.untyped_storage().data_ptr() in own for weight in weights.values()):
                self._targets |= weights
            else:
                self._groups |= dict.fromkeys(weights, group)
        self._shapes = self._named.layout
        self._missing = set(self._shapes)
        self._waiting: dict[str, Tensor] = {}

    @torch.no_grad()
    def write(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Write pairs of name and tensor. Raises RunFailedError for weights of another model."""
        for name, tensor in weights:
            shape = self._shapes[name].shape if name in self._shapes else None
            if shape is None:
                raise RunFailedError(f"The engine's model has no weight '{name}'.{suggestion(name, self._shapes)}")
            if tensor.shape != shape:
                raise RunFailedError(
                    f"Weight {name} has shape {tuple(tensor.shape)}, but {tuple(shape)} in the engine's model."
                )
            self._missing.discard(name)
            if name in self._targets:
                self._targets[name].copy_(tensor)
            else:
                # The sender may use the memory of `tensor` for the next weights, so it is copied.
                self._waiting[name] = tensor.detach().clone()
                self._join(self._groups[name])

    def finish(self) -> None:
        """End the update. Raises RunFailedError when weights are missing."""
        if self._missing:
            raise RunFailedError(f"New weights lack {listing(self._missing)}; all weights must be published.")

    def _join(self, group: WeightGroup) -> None:
        if not group.weights.keys() <= self._waiting.keys():
            return
        parts = {name: self._waiting.pop(name) for name in group.weights}
        joined = joined_weights(self._without_memory, parts)
        for part in group.parts:
            self._named.tensors[part.name].copy_(joined[part.name])

    @cached_property
    def _without_memory(self) -> PreTrainedModel:
        with torch.device("meta"):
            return type(self._causal)(self._causal.config)
