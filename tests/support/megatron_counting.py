"""Ranks of the Megatron backend that count what they compute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spurline_megatron_backend.open_rank import open_rank
from spurline_ranks.group import Place


def counting(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> Any:
    """Its `counts` gives the forwards of layers and of the attention inside of them, since the last time."""
    rank: Any = open_rank(place, plain_run, total_updates)
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from spurline_megatron_backend.core_attention import SegmentCoreAttention

    counts = {"layers": 0, "attention": 0}

    def count(kind: Any, name: str) -> None:
        forward = kind.forward

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return forward(self, *args, **kwargs)

        kind.forward = counted

    count(TransformerLayer, "layers")
    count(SegmentCoreAttention, "attention")

    def taken() -> dict[str, int]:
        result = dict(counts)
        counts.update(dict.fromkeys(counts, 0))
        return result

    rank.counts = taken
    return rank
