"""Train with transformers as an expert would write it by hand: packed, with varlen attention and fused kernels.

All sequences of a micro-batch are one stream without padding. Attention is torch's `varlen_attn` for half precision on
a GPU, or one call of scaled-dot-product attention for each sequence elsewhere. With Liger-Kernel, norms, rotary
positions, gated activations and the cross-entropy of bf16 logits are fused. Liger's fusion of the output layer with
the cross-entropy saves memory, but is slow with large vocabularies: it takes 64 tokens at a time with those of Qwen3.
The weights are fp32, autocast computes in bf16, and AdamW is fused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NAME = "packed_by_hand"
IGNORED = -100
LOGITS_TOKENS = 8192
"""Tokens of which logits exist at a time."""


class Packed:
    """One micro-batch: tokens, positions and targets int64 [1, T], and where its sequences begin int32 [N + 1]."""

    def __init__(self, sequences: Sequence[Sequence[int]], device: str) -> None:
        lengths = [len(sequence) for sequence in sequences]
        self.tokens = torch.tensor([list(chain.from_iterable(sequences))], device=device)
        self.positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(device)
        targets = [token for sequence in sequences for token in (*sequence[1:], IGNORED)]
        self.targets = torch.tensor([targets], device=device)
        self.starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
        self.lengths, self.longest = lengths, max(lengths)


_packed: list[Packed] = []
"""The micro-batch that the model reads, for the attention function: transformers passes it no such object."""


def use_fused_layers() -> bool:
    """Make transformers build Qwen3 with Liger's layers. Return False if Liger is not installed, or there is no GPU."""
    if find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return False
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3  # pyright: ignore

    apply_liger_kernel_to_qwen3(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False
    )
    return True


def use_varlen_attention(model: Any) -> None:
    """Make the model attend within the sequences of `_packed`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    model.set_attn_implementation(NAME)


@torch.compiler.disable
def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attend causally within each sequence: [1, heads, T, D] -> [1, T, heads, D]."""
    (batch,) = _packed
    if query.is_cuda:
        streams = [part[0].transpose(0, 1).to(torch.bfloat16) for part in (query, key, value)]
        return varlen(*streams, batch, scaling).unsqueeze(0), None
    parts = zip(*(part.split(batch.lengths, dim=2) for part in (query, key, value)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True) for q, k, v in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def varlen(query: Tensor, key: Tensor, value: Tensor, batch: Packed, scaling: float | None) -> Tensor:
    """Call torch's kernel: [T, heads, D] -> [T, heads, D], with fewer heads of keys and values or as many."""
    from torch.nn.attention.varlen import varlen_attn

    # In torch 2.11 the kernel takes fewer heads of keys than of queries without being told.
    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    starts, longest = batch.starts, batch.longest
    output = varlen_attn(
        query, key, value, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0), **grouped
    )
    assert isinstance(output, Tensor)
    return output


def packed_batches(sequences: Sequence[Sequence[int]], limit: int, device: str) -> list[Packed]:
    """Fill micro-batches of at most `limit` tokens, with the longest sequences first."""
    groups: list[list[Sequence[int]]] = []
    for sequence in sorted(sequences, key=len, reverse=True):
        room = next((group for group in groups if sum(map(len, group)) + len(sequence) <= limit), None)
        if room is None:
            groups.append(room := [])
        room.append(sequence)
    return [Packed(group, device) for group in groups]


def summed_cross_entropy(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return Liger's cross-entropy on a GPU, which keeps logits in bf16, or torch's of fp32 logits, both summed."""
    if device == "cuda" and find_spec("liger_kernel") is not None:
        from liger_kernel.transformers import LigerCrossEntropyLoss  # pyright: ignore

        return LigerCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
    return lambda logits, targets: F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def make_step(
    model: Any, sequences: Sequence[Sequence[int]], limit: int, device: str, optimizer: torch.optim.Optimizer
) -> Callable[[], float]:
    """Return a function that takes one step over all sequences, and returns the mean loss of their tokens."""
    batches = packed_batches(sequences, limit, device)
    total = sum(len(sequence) - 1 for sequence in sequences)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # peft wraps the model; the decoder and the output layer are those of the model inside.
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    decoder, head = inner.model, inner.lm_head
    cross_entropy = summed_cross_entropy(device)

    def part_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(head(hidden), targets)

    def summed_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        if len(hidden) <= LOGITS_TOKENS:
            return part_loss(hidden, targets)
        parts = zip(hidden.split(LOGITS_TOKENS), targets.split(LOGITS_TOKENS), strict=True)
        losses = [checkpoint(part_loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum()  # pyright: ignore

    def step() -> float:
        summed = torch.zeros((), device=device)
        for batch in batches:
            _packed[:] = [batch]
            with torch.autocast(device, torch.bfloat16):
                hidden = decoder(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False)
                loss = summed_loss(hidden.last_hidden_state[0], batch.targets[0]) / total
            loss.backward()
            summed += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return summed.item()

    return step
