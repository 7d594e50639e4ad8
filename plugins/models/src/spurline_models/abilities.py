"""Optional abilities of backends, and the roles that they train.

The facts of a backend (`BackendFacts`) say which abilities it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError, suggestion
from spurline.protocols.backend import Role

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def check_trained(role: Role, *, has_critic: bool) -> None:
    """Raise ModelError for a role whose model is not trained. `has_critic` says whether the run has a critic."""
    if role not in ("policy", "critic"):
        raise ModelError(f"The model with the role '{role}' is never trained. Only the policy and a critic are.")
    if role == "critic" and not has_critic:
        raise ModelError("This run has no critic. Add a section `critic: {}`, or choose an advantage that needs none.")


def check_played(role: Role, model: ModelConfig) -> None:
    """Raise ModelError if this run has no model with this role."""
    roles = ("policy", "reference", "critic", *model.frozen)
    if role not in roles:
        raise ModelError(
            f"This run has no model with the role '{role}'.{suggestion(role, roles)} Add model.frozen.{role}."
        )


def check_generates(model: ModelConfig) -> None:
    """Raise ModelError for a model that has no vocabulary."""
    if model.head == "score":
        raise ModelError(
            f"model.head is score: {model.path} gives scores, and cannot generate. Use the language model that it was "
            "made from."
        )


@runtime_checkable
class Generates(Protocol):
    """A backend that can generate answers to held-out prompts itself. Its facts say `generates`."""

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """Return one greedy answer per prompt, with the end-of-sequence token if the model generated it."""
        ...


@runtime_checkable
class TrainsAdapters(Protocol):
    """A backend that may train adapters, and can return them without the weights that they adapt."""

    def adapter_settings(self) -> Mapping[str, Any] | None:
        """Return the policy's adapter settings as in PEFT's `adapter_config.json`, or None without an adapter."""
        ...

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of the policy's adapter, named as in `adapter_model.safetensors` of PEFT."""
        ...


@runtime_checkable
class YieldsDevice(Protocol):
    """A backend that can give the memory of its devices to engines that generate while it does not train.

    Between `yield_device` and `take_device`, the backend can only yield weights, return facts, save and close. Other
    calls raise RunFailedError.
    """

    def yield_device(self, *, keep_weights: bool) -> None:
        """Move the state of the backend, such as the optimizer's, to the host's memory, and free the device.

        With `keep_weights`, the models' weights stay on the device. A later call without it frees them too. Raises
        RunFailedError if the host has too little memory.
        """
        ...

    def take_device(self) -> None:
        """Bring everything back, bit for bit. Raises RunFailedError if the device has too little memory."""
        ...


@dataclass(frozen=True)
class GenerationModel:
    """A model that is lent for generation.

    Attributes:
        causal: The model. Its logits depend on the decoder's last hidden states alone.
        computing: Returns the context for a forward pass, such as autocast.
        max_tokens: Maximum number of tokens of prompt and response together, or None if there is no limit.
        reads_streams: Whether tokens influence each other only in attention layers, and their code can be replaced.
    """

    causal: PreTrainedModel
    computing: Callable[[], AbstractContextManager[object]]
    max_tokens: int | None
    reads_streams: bool = True


@runtime_checkable
class LendsModel(Protocol):
    """A backend whose whole model is in this process. Its facts say `lends_model`."""

    def generation_model(self) -> GenerationModel:
        """Return the model that is trained, not a copy.

        The borrower may change its mode and attention, but must restore both before it calls the backend again.
        """
        ...
