"""Ranks of small worlds that compute parts of what tests of the Megatron backend compute whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from read_distributions import ReadsEverything, total_of
from sharing_workers import GroupsOfNeighbours
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig

from spurline_megatron_backend.architecture import read_architecture
from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_megatron_backend.core_attention import SegmentCoreAttention, StreamParams
from spurline_megatron_backend.gpt import Groups
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.model_building import build_parts
from spurline_megatron_backend.vocab_parallel import VocabularyLogprobs
from spurline_models.streams.token_logprobs import LogitReading, ReadStates
from spurline_ranks.group import Place


class _Copied(torch.autograd.Function):
    """Hidden states as the input of a column-parallel layer: their gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        gradient = grads[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class VocabularyRank(GroupsOfNeighbours):
    """Ranks that divide a vocabulary."""

    def scores(
        self,
        size: int,
        hidden: np.ndarray,
        weight: np.ndarray,
        targets: np.ndarray,
        chunk_tokens: int,
        want_entropy: bool,
        temperature: float,
        half_precision: bool,
        support: np.ndarray | None = None,
    ) -> dict[str, Any]:
        """Return scores, the gradients of a loss of them, and the number of positions in each chunk of logits.

        weight: [V, H] of the whole vocabulary, from which each rank takes its rows.
        support: Token ids [N, K] to which the distribution is restricted, padded with -1.
        """
        group = self._groups[size]
        own = _own_rows(weight, group)
        dtype = torch.bfloat16 if half_precision else own.dtype
        states = torch.from_numpy(hidden).to(dtype).requires_grad_()
        layer = own.to(dtype).requires_grad_()
        computed: list[int] = []

        def logits(chunk: Tensor) -> Tensor:
            computed.append(len(chunk))
            copied = _Copied.apply(chunk, group)
            assert isinstance(copied, Tensor)
            return copied @ layer.T

        score = VocabularyLogprobs(logits, group, len(weight), chunk_tokens)
        logprobs, entropy = score(
            states,
            torch.from_numpy(targets),
            want_entropy,
            temperature,
            None if support is None else torch.from_numpy(support),
        )
        loss = loss_of(logprobs, entropy)
        gradients = torch.autograd.grad(loss, [states, layer])
        return {
            "dtype": str(logprobs.dtype),
            "logprobs": logprobs.detach().numpy(),
            "entropy": None if entropy is None else entropy.detach().numpy(),
            "hidden": gradients[0].double().numpy(),
            "weight": gradients[1].double().numpy(),
            "computed": computed,
        }

    def read(
        self,
        size: int,
        hidden: np.ndarray,
        weight: np.ndarray,
        targets: np.ndarray,
        other: tuple[np.ndarray, np.ndarray],
        chunk_tokens: int,
    ) -> dict[str, Any]:
        """Return what `ReadsEverything` makes of these models, and the gradients. `other`: hidden states, weight."""
        group = self._groups[size]
        states, layer = torch.from_numpy(hidden).requires_grad_(), _own_rows(weight, group).requires_grad_()
        of_other = _own_rows(other[1], group)

        def logits(chunk: Tensor) -> Tensor:
            copied = _Copied.apply(chunk, group)
            assert isinstance(copied, Tensor)
            return copied @ layer.T

        others = VocabularyLogprobs(lambda chunk: chunk @ of_other.T, group, len(other[1]), 1)
        reading = LogitReading(ReadsEverything(), {"reference": ReadStates(others, torch.from_numpy(other[0]))})
        score = VocabularyLogprobs(logits, group, len(weight), chunk_tokens)
        columns = {"scale": torch.linspace(0.5, 1, len(targets), dtype=torch.float64)}
        stream: Any = SimpleNamespace(targets=torch.from_numpy(targets), columns=columns, support=None)
        logprobs, entropy, values = score.read(states, stream, reading, True, 0.7)
        assert entropy is not None
        gradients = torch.autograd.grad(total_of(values, logprobs, entropy), [states, layer])
        found = {name: value.detach().numpy() for name, value in values.items()}
        return {**found, "hidden": gradients[0].numpy(), "weight": gradients[1].numpy()}


def _own_rows(weight: np.ndarray, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of the weight. Rows of padding are there, and must not matter."""
    rows = -(-len(weight) // group.size())
    first = group.rank() * rows
    own = torch.full((rows, weight.shape[1]), 7.0, dtype=torch.from_numpy(weight).dtype)
    part = torch.from_numpy(weight[first : first + rows])
    own[: len(part)] = part
    return own


def loss_of(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """Return a loss with a different gradient at every position."""
    factors = torch.arange(1, len(logprobs) + 1, dtype=logprobs.dtype)
    loss = (logprobs * factors).sum() + (logprobs**2).sum()
    return loss if entropy is None else loss + (entropy * factors.flip(0)).sum() + (entropy**3).sum()


def attention_inputs(num_tokens: int, heads: int, key_heads: int) -> list[Tensor]:
    """Query, key and value of every token."""
    generator = torch.Generator().manual_seed(heads * 8 + key_heads)
    return [
        torch.randn(num_tokens, number, 8, generator=generator).requires_grad_()
        for number in (heads, key_heads, key_heads)
    ]


def core_attention(inputs: list[Tensor], params: StreamParams, *, recompute: bool = False) -> Tensor:
    """Return the output of the core attention within Megatron's attention layer."""
    heads, size = inputs[0].shape[1:]
    config = TransformerConfig(num_layers=1, hidden_size=heads * size, num_attention_heads=heads, attention_dropout=0.0)
    attention = SegmentCoreAttention(config)

    def attend(*parts: Tensor) -> Tensor:
        return attention(*parts, None, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)

    output = checkpoint(attend, *inputs, use_reentrant=False) if recompute else attend(*inputs)
    assert isinstance(output, Tensor)
    return output


class BuildingRank:
    """One rank, which builds models as on a GPU, with torch's device `meta` instead."""

    def __init__(self, place: Place) -> None:
        parallel_state.initialize_model_parallel()
        tensor: Any = parallel_state.get_tensor_model_parallel_group()
        self._groups = Groups(Grid(1), Grid(1).place(0), tensor, None)

    def devices(self, model: str, settings: dict[str, Any], critic: bool) -> dict[str, tuple[str, str]]:
        """Device and dtype of every parameter and buffer of the model in this folder."""
        # Megatron copies the token counts of experts to the host on the stream.
        with patch.multiple(torch.cuda, current_device=lambda: torch.device("meta"), Stream=object):
            architecture = read_architecture(AutoConfig.from_pretrained(model))
            config = MegatronBackendConfig.model_validate(settings)
            [part] = build_parts(architecture, config, self._groups, critic=critic)
        tensors = {**dict(part.named_parameters()), **dict(part.named_buffers())}
        return {name: (tensor.device.type, str(tensor.dtype)) for name, tensor in tensors.items()}
