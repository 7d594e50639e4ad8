"""The experts that the routers of a mixture-of-experts model choose: noted in one forward pass, used in another.

Place on the way: engine's forward passes -> experts of every token -> `TrainingBatch` -> `TokenStream` -> the trainer's
routers. Rounding alone makes a router of the trainer choose other experts than the engine did for some tokens, and then
the two models compute different functions (rollout routing replay, Ma et al. 2025, arXiv:2510.11370). What is replayed
is only which experts a token goes to: their weights come from the trainer's own router logits, so gradients reach the
router.

It works by hooks on one model's attention modules and routers. Two models in a process know nothing of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from spurline.data.batch import ROUTED_EXPERTS, TrainingBatch
from spurline.errors import DataError, ModelError, listing
from spurline.model.architecture import decoder_layers, num_experts
from spurline.model.expert_loads import ExpertLoads

RouterWeights = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Router, its logits [T, experts] and the experts chosen [T, top_k] -> the weight of each of these [T, top_k]."""


def _normalized_where_asked(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    probabilities = torch.nn.functional.softmax(logits, dtype=torch.float, dim=-1).gather(-1, experts)
    if router.norm_topk_prob:
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    return probabilities.to(logits.dtype)


def _normalized(router: nn.Module, logits: Tensor, experts: Tensor) -> Tensor:
    probabilities = torch.nn.functional.softmax(logits.float(), dim=-1).gather(-1, experts)
    return probabilities / probabilities.sum(dim=-1, keepdim=True)


ROUTERS: Mapping[str, RouterWeights] = {
    "Qwen3MoeTopKRouter": _normalized_where_asked,
    "Qwen2MoeTopKRouter": _normalized_where_asked,
    "OlmoeTopKRouter": _normalized_where_asked,
    "MixtralTopKRouter": _normalized,
}
"""Class of transformers -> how it weighs experts. All return (logits, weights, experts)."""


def has_routers(causal: PreTrainedModel) -> bool:
    """Whether `ExpertRouting` knows routers of this model."""
    return any(type(module).__name__ in ROUTERS for module in causal.modules())


_ATTENTION = "self_attn"
"""What the layers of all these models call their attention."""


class ExpertRouting:
    """The routers of one model, whose choices can be noted and replaced.

    num_layers: decoder layers, those without experts included. top_k: experts of a token in a layer.
    """

    def __init__(self, causal: PreTrainedModel) -> None:
        """Raises ModelError for a model without experts, and for one whose routers are of no known kind."""
        layers = decoder_layers(causal)
        self._given: dict[int, Tensor | None] = {}
        self._noted: dict[int, Tensor] | None = None
        self.loads: ExpertLoads | None = None
        """Counts the tokens of each expert while it is set."""
        self.counted: slice | Tensor = slice(None)
        """Which tokens of the next pass are counted."""
        self.num_layers = len(layers)
        self.top_k = 0
        for number, layer in enumerate(layers):
            for router in layer.modules():
                weigh = ROUTERS.get(type(router).__name__)
                if weigh is None:
                    continue
                self.top_k = int(getattr(router, "top_k"))  # noqa: B009 - modules have no typed attributes
                # The attention before the router gets the keywords of the layer. Hooks of the layer itself do not run
                # when its activations are computed again in the backward pass, those of what is inside do.
                layer.get_submodule(_ATTENTION).register_forward_pre_hook(partial(self._take, number), with_kwargs=True)
                # First: where experts are divided over ranks, what follows translates their numbers.
                router.register_forward_hook(partial(self._choose, number, weigh), prepend=True)
        if not self.top_k:
            raise no_routers(f"{causal.config.name_or_path} ({type(causal).__name__})")

    @contextmanager
    def noting(self) -> Iterator[dict[int, Tensor]]:
        """A context in which every forward pass leaves its choices here: layer -> experts [T, top_k]."""
        noted: dict[int, Tensor] = {}
        self._noted = noted
        try:
            yield noted
        finally:
            self._noted = None

    def as_array(self, noted: Mapping[int, Tensor]) -> NDArray[np.int16]:
        """What `noting` left of a pass over T tokens, as [T, layers, top_k]; -1 in layers without experts."""
        tokens = len(next(iter(noted.values())))
        whole = np.full((tokens, self.num_layers, self.top_k), -1, np.int16)
        layers = sorted(noted)
        whole[:, layers] = torch.stack([noted[layer] for layer in layers], dim=1).to("cpu", torch.int16).numpy()
        return whole

    def check(self, experts: Tensor) -> None:
        """Raise DataError for experts [T, layers, top_k] of a model with other layers or another top_k."""
        check_experts(experts, self.num_layers, self.top_k)

    def _take(
        self, number: int, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # As an argument, not set once per pass: what is computed again in the backward pass gets the same arguments,
        # also when another micro-batch has been computed in between.
        experts = kwargs.get(ROUTED_EXPERTS)
        self._given[number] = None if experts is None else experts[:, number].long()
        return args, {name: value for name, value in kwargs.items() if name != ROUTED_EXPERTS}

    def _choose(
        self, number: int, weigh: RouterWeights, router: nn.Module, _: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = output
        given = self._given.pop(number, None)
        if given is not None:
            # Where the engine computed nothing, as at the last token it wrote, the router chooses itself.
            experts = torch.where(given[:, :1] >= 0, given, experts)
            weights = weigh(router, logits, experts).to(weights.dtype)
        if self._noted is not None:
            self._noted[number] = experts.detach()
        if self.loads is not None:
            self.loads.add(number, experts, logits.shape[-1], self.counted)
        return logits, weights, experts


def check_replayed(batch: TrainingBatch, config: PretrainedConfig) -> None:
    """Raise DataError for a batch with experts that the model of this config has not; ModelError if it has none at all.

    On the host, before any device or rank meets them: an index out of range ends a process with a GPU.
    """
    experts = batch.tokens.get(ROUTED_EXPERTS)
    if experts is None:
        return
    model = config.get_text_config()
    count = num_experts(model)
    if count is None:
        raise no_routers(f"{config.name_or_path} ({config.model_type})")
    check_experts(experts.flatten(0, 1), model.num_hidden_layers, model.num_experts_per_tok)
    # Row by row: the column is large, and so is what comparing it makes.
    for row in experts:
        known = row >= 0
        beyond = row[(row >= count) | (row < -1) | (known != known[..., :1])]
        if len(beyond):
            raise DataError(
                f"The rollouts note expert {int(beyond[0])} for a token, and those of the model are 0 to {count - 1}, "
                "or -1 for all of a layer where the engine chose none. They are another model's: record them again."
            )


def check_experts(experts: Tensor, num_layers: int, top_k: int) -> None:
    """Raise DataError for experts [T, layers, top_k] that are not of a model with these layers and this top_k."""
    if tuple(experts.shape[1:]) != (num_layers, top_k):
        raise DataError(
            f"The rollouts note {experts.shape[2]} experts in each of {experts.shape[1]} layers for a token, and the "
            f"model has {top_k} in {num_layers} layers. They are another model's: record them again."
        )


def no_routers(model: str) -> ModelError:
    """The error of a model whose experts cannot be replayed. model: its path, for the message."""
    return ModelError(
        f"source.router_replay is true, and the model {model} has no router that it knows. Set it to false, or choose "
        f"a mixture-of-experts model whose router is one of {listing(ROUTERS)}."
    )
