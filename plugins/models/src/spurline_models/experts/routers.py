"""Watch the routers of a mixture of experts, and replace the experts that they choose.

Routers choose experts with one call of `topk` on scores [T, E]. `RouterWatch` watches this call while the router's own
code runs, and may replace the result of the call. The router's code then computes weights for the replaced experts.
`why_not_replayed` tests whether this works for a router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from spurline_models.architecture import decoder_layers, experts_per_token, num_experts


def find_routers(causal: PreTrainedModel) -> dict[int, nn.Module]:
    """Return the routers, keyed by the number of their decoder layer.

    A router is a module for which `router_sizes` finds sizes, and which contains no other such module. A layer with
    several routers is left out, since engines do not distinguish them.
    """
    found = {number: _routers_of(layer) for number, layer in enumerate(decoder_layers(causal))}
    return {number: routers[0] for number, routers in found.items() if len(routers) == 1}


def _routers_of(layer: nn.Module) -> list[nn.Module]:
    found = [module for module in layer.modules() if router_sizes(module)]
    holders = {id(module) for module in found for part in module.modules() if part is not module and router_sizes(part)}
    return [module for module in found if id(module) not in holders]


class RouterSizes(NamedTuple):
    """The number of experts that a router chooses for a token, and the number of all its experts."""

    top_k: int
    num_experts: int


def router_sizes(module: nn.Module) -> RouterSizes | None:
    """Read a router's sizes from its attributes or its config (Gemma 4). Returns None if it is not a router."""
    top_k, count = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    config = getattr(module, "config", None)
    if top_k is None and count is None and config is not None and type(module).__name__.endswith("Router"):
        top_k, count = experts_per_token(config), num_experts(config)
    return RouterSizes(top_k, count) if isinstance(top_k, int) and isinstance(count, int) else None


def sizes_of(router: nn.Module) -> RouterSizes:
    sizes = router_sizes(router)
    assert sizes is not None, f"{type(router).__name__} is not a router"
    return sizes


@dataclass(frozen=True)
class Choice:
    """The choice of a router for T tokens.

    Attributes:
        experts: int64 [T, top_k].
        scores: [T, E], the differentiable scores of all experts.
        kind: The function that computed the scores from logits, or `logits` if they are logits, or "" if unknown.
    """

    experts: Tensor
    scores: Tensor
    kind: Literal["softmax", "sigmoid", "logits", ""]

    def shares(self) -> Tensor:
        """Return the shares of all experts for each token [T, E], at least in fp32. Rows sum to 1.

        A share is a softmax of the logits, or a sigmoid divided by the sum of sigmoids. If gradients are on, call
        this only outside of recomputed layers: a layer must save the same tensors in both passes.
        """
        assert self.kind, "the kind of scores is not known"
        scores = self.scores.to(torch.promote_types(self.scores.dtype, torch.float32))
        if self.kind == "logits":
            return scores.softmax(-1)
        return scores if self.kind == "softmax" else scores / scores.sum(-1, keepdim=True).clamp_min(1e-20)


class RouterWatch(TorchFunctionMode):
    """A context that records the call of `topk` that chooses experts, and may replace its result by `given`.

    `given` is [T, top_k]. For tokens with -1, the router's own choice stays.
    """

    def __init__(self, router: nn.Module, given: Tensor | None = None) -> None:
        super().__init__()
        self._sizes = sizes_of(router)
        self._given = given
        self._scores: tuple[Tensor, Literal["softmax", "sigmoid"]] | None = None
        self._chosen_from: Tensor | None = None
        self._experts: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "topk" and self._is_choice(args[0] if args else None, result):
            return self._choose(args[0], result)
        if (name == "softmax" or name == "sigmoid") and not self._experts and self._is_over_experts(result):
            self._scores = (result, name)
        return result

    def choice(self, outputs: Any) -> Choice | None:
        """Return the choice of the router that returned these outputs, or None if it did not choose exactly once."""
        if len(self._experts) != 1 or self._chosen_from is None:
            return None
        if self._scores is not None:
            return Choice(self._experts[0], *self._scores)
        # Routers that choose by logits return these logits. Scores that are not returned are of an unknown kind.
        is_logits = any(output is self._chosen_from for output in _tensors(outputs))
        return Choice(self._experts[0], self._chosen_from, "logits" if is_logits else "")

    def _is_over_experts(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == self._sizes.num_experts

    def _is_choice(self, scores: Any, result: Any) -> bool:
        # Some routers choose groups of experts first, by scores of another shape.
        return self._is_over_experts(scores) and result[1].shape[1] == self._sizes.top_k

    def _choose(self, scores: Tensor, own: Any) -> Any:
        experts = own[1]
        self._chosen_from = scores
        if self._given is not None:
            # Tokens that the engine did not compute, such as the last one, have -1.
            experts = torch.where(self._given[:, :1] >= 0, self._given, experts)
            own = torch.return_types.topk((scores.gather(1, experts), experts))
        self._experts.append(experts.detach())
        return own


def _tensors(outputs: Any) -> Iterator[Tensor]:
    yield from (output for output in (outputs if isinstance(outputs, tuple) else (outputs,)) if torch.is_tensor(output))


def why_not_replayed(router: nn.Module, args: Any, kwargs: Any) -> str | None:
    """Return why choices cannot be replayed in the router, found by running it on this input, or None if they can.

    If the router gets its own choice back, its results must stay the same. If it gets other experts, it must give them
    weights.
    """
    own, choice = _run(router, args, kwargs, None)
    if choice is None:
        return "does not choose its experts with one call of topk"
    again, _ = _run(router, args, kwargs, choice.experts)
    if not all(torch.equal(one, other) for one, other in zip(_tensors(own), _tensors(again), strict=True)):
        return "gives other results for the experts that it chose itself"
    # Like the chosen experts, the experts after them are distinct.
    others = (choice.experts + 1) % sizes_of(router).num_experts
    replaced, _ = _run(router, args, kwargs, others)
    weights = [one for one in _tensors(replaced) if one.shape == others.shape and one.is_floating_point()]
    if not all(bool((one.isfinite() & (one != 0)).all()) for one in weights):
        return "gives no weight to experts that it would not have chosen"
    return None


def _run(router: nn.Module, args: Any, kwargs: Any, given: Tensor | None) -> tuple[Any, Choice | None]:
    with RouterWatch(router, given) as watch:
        outputs = router.forward(*args, **kwargs)
    return outputs, watch.choice(outputs)
