"""A causal language model that is ready to generate, and the backends that lend theirs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class GenerationModel:
    """A model and what its owner knows about it.

    causal: its logits are its output embeddings of the decoder's last hidden states, nothing more; its decoder hands
    keyword arguments on to an attention that can be replaced.
    computing: makes the context of a forward pass, such as autocast.
    max_tokens: prompt and response together; None without a limit.
    """

    causal: PreTrainedModel
    computing: Callable[[], AbstractContextManager[object]]
    max_tokens: int | None


@runtime_checkable
class LendsModel(Protocol):
    """A backend whose whole model is in this process."""

    def generation_model(self) -> GenerationModel:
        """The very model that is trained, not a copy.

        Its mode and attention are the borrower's while it generates, and as they were afterwards; the backend must not
        be called meanwhile.
        """
        ...
