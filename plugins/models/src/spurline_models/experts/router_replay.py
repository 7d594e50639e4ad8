"""Record the experts that the routers of a model choose in one forward pass, and use them again in another.

Because of rounding, routers of the trainer choose other experts than routers of the engine for some tokens. The two
models then compute different functions (rollout routing replay, Ma et al. 2025, arXiv:2510.11370). Only the choice is
replayed. The weights of experts come from the trainer's own router logits, so gradients reach the router.

The same hooks also compute the balance loss and count how many tokens each expert gets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from spurline.data.batch import ROUTED_EXPERTS, TrainingBatch
from spurline.errors import DataError, ModelError
from spurline_models.architecture import decoder_layers, experts_per_token, num_experts
from spurline_models.experts.router_balance import StreamBalance
from spurline_models.experts.routers import Choice, RouterWatch, find_routers, sizes_of

Watcher = TypeVar("Watcher")

Loads = Mapping[int, NDArray[np.int64]]
"""The number of tokens of each expert, int64 [E], keyed by the number of the layer."""


class ExpertLoads:
    """Counts of the tokens that experts get, on the device."""

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}

    @torch.no_grad()
    def add(self, layer: int, experts: Tensor, num_experts: int, counted: slice | Tensor) -> None:
        """Count the experts [T, top_k] of a layer, for the `counted` tokens only. The others are padding."""
        chosen = experts[counted].flatten()
        if layer not in self._sums:
            self._sums[layer] = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
        self._sums[layer].scatter_add_(0, chosen, torch.ones_like(chosen))

    def fetch(self) -> Loads:
        if not self._sums:
            return {}
        # Join the counts, so that there is one transfer for all layers.
        parts = torch.cat([*self._sums.values()]).cpu().split([len(sums) for sums in self._sums.values()])
        return {layer: part.numpy() for layer, part in zip(self._sums, parts, strict=True)}


def load_metrics(parts: Iterable[Loads]) -> dict[str, float]:
    """Return the metrics of the loads of all ranks together, or {} for a model without experts.

    The imbalance of a layer is the load of its busiest expert, divided by the mean load. `moe/imbalance` is the mean
    over layers, and `moe/imbalance/max` the worst layer. `moe/idle_experts` is the share of experts without a token.
    """
    totals: dict[int, NDArray[np.int64]] = {}
    for part in parts:
        for layer, load in part.items():
            totals[layer] = totals[layer] + load if layer in totals else load
    counted = [load for _, load in sorted(totals.items()) if load.sum() > 0]
    if not counted:
        return {}
    ratios = [float(load.max() / load.mean()) for load in counted]
    idle = sum(int((load == 0).sum()) for load in counted) / sum(len(load) for load in counted)
    return {"moe/imbalance": sum(ratios) / len(ratios), "moe/imbalance/max": max(ratios), "moe/idle_experts": idle}


class ExpertRouting:
    """The routers of one model, whose choices can be recorded and replaced. Raises ModelError if none are found.

    Attributes:
        num_layers: Number of decoder layers, including those without experts.
        top_k: Number of experts that a layer uses for a token.
        num_experts: Number of experts in the layer with the fewest.
    """

    def __init__(self, causal: PreTrainedModel) -> None:
        layers = decoder_layers(causal)
        self._given: dict[int, Tensor | None] = {}
        self._noted: dict[int, Tensor] | None = None
        self._to_balance: dict[int, Choice] = {}
        self.loads: ExpertLoads | None = None
        """If set, it counts the tokens of each expert."""
        self.balance: StreamBalance | None = None
        """If set, it sums the balance loss of the next stream."""
        self.counted: slice | Tensor = slice(None)
        """The tokens of the next pass that are not padding."""
        self.stream_tokens: slice = slice(None)
        """The positions of the `counted` tokens in the stream."""
        self.num_layers = len(layers)
        self.routers = find_routers(causal)
        if not self.routers:
            raise no_routers(f"{causal.config.name_or_path} ({type(causal).__name__})")
        self.top_k = sizes_of(next(iter(self.routers.values()))).top_k
        self.num_experts = min(sizes_of(router).num_experts for router in self.routers.values())
        for number, layer in enumerate(layers):
            # Hooks of the layer itself do not run when its activations are recomputed. Hooks of its children do.
            for child in layer.children():
                child.register_forward_pre_hook(partial(self._take, number), with_kwargs=True)
            router = self.routers.get(number)
            if router is not None:
                # Replace `forward` instead of adding a hook. If experts are divided over ranks, other hooks translate
                # the numbers of experts, and a hook here might see the translated numbers.
                router.forward = partial(self._run, number, router, router.forward)
                layer.register_forward_pre_hook(partial(self._enter, number))
                layer.register_forward_hook(partial(self._leave, number))

    def noting(self) -> AbstractContextManager[dict[int, Tensor]]:
        """Record the chosen experts [T, top_k] of a forward pass in the context, keyed by the number of the layer."""
        return self.watching("_noted", {})

    @contextmanager
    def watching(self, name: str, watcher: Watcher) -> Iterator[Watcher]:
        """Set the attribute `name`, such as `loads`, to `watcher` in the context."""
        before = getattr(self, name)
        setattr(self, name, watcher)
        try:
            yield watcher
        finally:
            setattr(self, name, before)

    def as_array(self, noted: Mapping[int, Tensor]) -> NDArray[np.int16]:
        """Return recorded choices as [T, layers, top_k], with -1 in layers without experts."""
        tokens = len(next(iter(noted.values())))
        whole = np.full((tokens, self.num_layers, self.top_k), -1, np.int16)
        layers = sorted(noted)
        whole[:, layers] = torch.stack([noted[layer] for layer in layers], dim=1).to("cpu", torch.int16).numpy()
        return whole

    def _enter(self, number: int, layer: nn.Module, args: Any) -> None:
        # Remove experts that were given to a recomputation which stopped before the router.
        self._given.pop(number, None)

    def _take(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        # The experts are an argument of the layer, so that recomputation in the backward pass gets the same experts.
        if ROUTED_EXPERTS not in kwargs:
            return None
        experts: Tensor = kwargs[ROUTED_EXPERTS]
        if number in self.routers:
            self._given[number] = experts[:, number].long()
        return args, {name: value for name, value in kwargs.items() if name != ROUTED_EXPERTS}

    def _run(self, number: int, router: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = self._given.pop(number, None)
        if given is None and self._noted is None and self.loads is None and self.balance is None:
            return forward(*args, **kwargs)
        with RouterWatch(router, given) as watch:
            outputs = forward(*args, **kwargs)
        # In the backward pass, recomputed layers repeat choices that have already been seen.
        if torch._C._current_graph_task_id() == -1:
            self._see(number, router, watch.choice(outputs))
        return outputs

    def _see(self, number: int, router: nn.Module, choice: Choice | None) -> None:
        if self.balance is not None and (choice is None or not choice.kind):
            self.balance.unknown = type(router).__name__
        if choice is None:
            return
        if self._noted is not None:
            self._noted[number] = choice.experts
        if self.loads is not None:
            self.loads.add(number, choice.experts, sizes_of(router).num_experts, self.counted)
        if self.balance is not None and choice.kind:
            self._to_balance[number] = choice

    def _leave(self, number: int, layer: nn.Module, args: Any, output: Any) -> None:
        # Add the balance outside of the layer, since a recomputed layer must save the same tensors both times.
        choice = self._to_balance.pop(number, None)
        if choice is not None and self.balance is not None:
            self.balance.add(choice, self.counted, self.stream_tokens, len(self.routers))


def without_routing(batch: TrainingBatch) -> TrainingBatch:
    """Return the batch without recorded experts, for a model that did not make the rollouts."""
    return replace(batch, tokens={k: v for k, v in batch.tokens.items() if k != ROUTED_EXPERTS}, on_release=None)


def check_replayed(batch: TrainingBatch, config: PretrainedConfig) -> None:
    """Raise DataError if a batch has experts that the model lacks, and ModelError if the model has no experts.

    Without this check, an index out of range would end a process that uses a GPU.
    """
    experts = batch.tokens.get(ROUTED_EXPERTS)
    if experts is None:
        return
    model = config.get_text_config()
    count, top_k = num_experts(model), experts_per_token(model)
    if count is None or top_k is None:
        raise no_routers(f"{config.name_or_path} ({config.model_type})")
    layers = model.num_hidden_layers
    if tuple(experts.shape[2:]) != (layers, top_k):
        raise DataError(
            f"The rollouts have {experts.shape[3]} experts in each of {experts.shape[2]} layers for a token, and the "
            f"model has {top_k} in {layers} layers. The rollouts come from another model. Record them again."
        )
    # Check row by row to save memory, since the column is large.
    for row in experts:
        known = row >= 0
        beyond = row[(row >= count) | (row < -1) | (known != known[..., :1])]
        if len(beyond):
            raise DataError(
                f"The rollouts have expert {int(beyond[0])} for a token, and the model has 0 to {count - 1}. (If an "
                "expert is -1, the token's others in the layer must be too.) The rollouts come from another model. "
                "Record them again."
            )


def no_routers(model: str) -> ModelError:
    """Return the error to raise if `source.router_replay` is true and the model has no known routers."""
    return ModelError(
        f"source.router_replay is true, and no router is known in the model {model}. Set source.router_replay: false, "
        "or choose a mixture-of-experts model."
    )
