"""Ranks of the Megatron backend that check their model at start-up again, with a mistake that a version could have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from spurline.errors import ModelError
from spurline_megatron_backend.open_rank import open_rank
from spurline_models.streams.token_stream import SegmentPlan, TokenStream, plan_segments
from spurline_ranks.group import Place


def probing(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> Any:
    """Open a rank whose `check` makes the mistake of a name and returns the error of the probe, or None."""
    rank: Any = open_rank(place, plain_run, total_updates)
    from spurline_megatron_backend.probe import check_exactness

    def check(mistake: str) -> str | None:
        half = rank._config.computes_in == "bf16"
        try:
            with _MISTAKES[mistake](rank):
                check_exactness(
                    rank._policy.model,
                    rank._architecture,
                    rank._groups.grid,
                    rank._profile,
                    "tiny",
                    half_precision=half,
                    doing=place.doing,
                )
        except ModelError as error:
            return str(error)
        return None

    def is_as_it_was() -> bool:
        """Return whether the model is in training mode and computes with its own settings."""
        [*parts] = rank._policy.model.parts
        score = parts[-1].score
        chunks = score is None or score.chunk_tokens == rank._config.chunk_tokens
        return chunks and rank._policy.model._sharing is rank._sharing and all(part.training for part in parts)

    rank.check = check
    rank.is_as_it_was = is_as_it_was
    return rank


@contextmanager
def _none(rank: Any) -> Iterator[None]:
    yield


@contextmanager
def _attention_that_ignores_segments(rank: Any) -> Iterator[None]:
    from spurline_megatron_backend import core_attention

    attend = core_attention.attend_segments

    def across(query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scaling: float | None) -> Tensor:
        length = np.array([int(plan.cu_seqlens[-1])])
        one = plan_segments(length, 0, rank._profile.send)
        return attend(query, key, value, replace(one, exchange=plan.exchange), scaling)

    with mock.patch.object(core_attention, "attend_segments", across):
        yield


@contextmanager
def _layers_that_mix_neighbours(rank: Any) -> Iterator[None]:
    """Mix neighbours in the first layer of each rank, as a convolution does."""

    def add_neighbour(module: nn.Module, arguments: Any, output: Any) -> Any:
        hidden, *others = output
        return (hidden + hidden.roll(1, dims=0), *others)

    handle = rank._policy.model.parts[0].decoder.layers[0].register_forward_hook(add_neighbour)
    try:
        yield
    finally:
        handle.remove()


def _of_positions(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    @contextmanager
    def changed(rank: Any) -> Iterator[None]:
        from spurline_megatron_backend import stages

        params = stages.packed_params

        def other(part: TokenStream, rotary: Any) -> Any:
            return params(replace(part, position_ids=change(part.position_ids)), rotary)

        with mock.patch.object(stages, "packed_params", other):
            yield

    return changed


@contextmanager
def _chunks_of_other_targets(rank: Any) -> Iterator[None]:
    """Every chunk scores the target of the position beside it."""
    from spurline_megatron_backend.vocab_parallel import VocabularyLogprobs

    in_chunks = VocabularyLogprobs.__call__

    def beside(score: Any, hidden: Tensor, targets: Tensor, *options: Any) -> Any:
        return in_chunks(score, hidden, targets if len(targets) <= score.chunk_tokens else targets.roll(1), *options)

    with mock.patch.object(VocabularyLogprobs, "__call__", beside):
        yield


@contextmanager
def _values_that_are_no_numbers(rank: Any) -> Iterator[None]:
    """Make the values NaN in the last stage alone."""
    if rank._policy.model.parts[-1].score is None:
        yield
        return
    weight = rank._policy.model.parts[-1].decoder.final_layernorm.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


_MISTAKES: dict[str, Callable[[Any], Any]] = {
    "none": _none,
    "attention ignores segments": _attention_that_ignores_segments,
    "layers mix neighbours": _layers_that_mix_neighbours,
    "positions run through": _of_positions(lambda positions: torch.arange(positions.shape[1]).unsqueeze(0)),
    "positions are those of the token before": _of_positions(lambda positions: positions.roll(1, dims=1)),
    "chunks score other targets": _chunks_of_other_targets,
    "values are no numbers": _values_that_are_no_numbers,
}
