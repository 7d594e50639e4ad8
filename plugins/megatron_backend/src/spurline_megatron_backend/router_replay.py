"""Send tokens to the experts that the engine chose, and count the tokens of each expert.

Data flow: `TokenStream.routed_experts` of this rank's tokens -> `StreamParams`, an argument of every layer ->
the router of the layer. The weights of experts still come from the router, so the router gets gradients. Megatron's own
replay has one list of routers for the whole process, which would mix the routers of policy and reference. Here each
router has its own object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from spurline_megatron_backend.core_attention import StreamParams
from spurline_megatron_backend.gpt import HiddenGPT
from spurline_models.experts.router_replay import ExpertLoads


class RouterChoice:
    """Chooses experts for one router. A token gets the given experts, or else the experts with the highest scores.

    Args:
        layer: The number of the layer in the whole model, counted from 0.
        group: The ranks that divide the tokens. Each rank routes consecutive tokens.
        replays: Whether the router uses the experts that a stream contains.
    """

    def __init__(self, layer: int, group: ProcessGroup, *, replays: bool) -> None:
        self._layer = layer
        self._group = group
        self._replays = replays
        self._given: Tensor | None = None
        self._num_fill = 0
        self.loads: ExpertLoads | None = None
        """Adds up the number of tokens of each expert. If None, tokens are not counted."""

    def take(self, attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the given experts from the arguments of the layer's attention, in a hook that runs before attention.

        If layers are recomputed, the hook runs again with the same arguments.
        """
        params = kwargs.get("packed_seq_params")
        assert isinstance(params, StreamParams), type(params)
        experts = params.part.routed_experts if self._replays else None
        tokens = params.part.num_tokens // self._group.size()
        start = self._group.rank() * tokens
        self._num_fill = min(max(0, params.part.num_fill - start), tokens)
        self._given = None if experts is None else experts[start : start + tokens, self._layer].long()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose experts by scores [tokens, experts]; return their scores and numbers, both [tokens, topk]."""
        assert default_compute_topk is not None
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given, self._given = self._given, None
        if given is not None:
            assert given.shape == chosen.shape, (given.shape, chosen.shape)
            chosen = torch.where(given[:, :1] >= 0, given, chosen)
            values = scores.gather(1, chosen)
        if self.loads is not None:
            self.loads.add(self._layer, chosen, scores.shape[1], slice(self._num_fill, None))
        return values, chosen


def router_choices(parts: Iterable[HiddenGPT], tensor: ProcessGroup, *, replay: bool) -> list[RouterChoice]:
    """Give each router of a model a `RouterChoice`. With `replay`, routers use the experts that a stream contains."""
    choices: list[RouterChoice] = []
    for part in parts:
        for layer in cast(Iterable[Any], part.decoder.layers):
            router = getattr(layer.mlp, "router", None)
            if router is not None:
                router.router_replay = choice = RouterChoice(layer.layer_number - 1, tensor, replays=replay)
                layer.self_attention.register_forward_pre_hook(choice.take, with_kwargs=True)
                choices.append(choice)
    return choices
