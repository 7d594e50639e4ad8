"""Compute logprobs and entropies of logits with Triton kernels, on GPUs.

PyTorch copies half-precision logits to fp32, and keeps their log-softmax and its gradient, too. These kernels read the
logits as they are, compute in fp32, and overwrite the logits with their gradients in the backward pass. So a logit
needs only its own memory, and its gradient is rounded once. One pass finds the maximum and the sum of exponentials
(online softmax, arXiv:1805.02867).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _WARPS = 8192, 16  # logits that a program reads at once, and its warps


class FusedLogprobs(torch.autograd.Function):
    """A function that returns the logprobs [N] of targets [N] after logits [N, V], and entropies [N] or None.

    Results are fp32. The distribution is softmax(logits / temperature). The backward pass overwrites the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, want_entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        logits = logits.detach().contiguous()
        count, size = logits.shape
        results = logits.new_empty((4, count), dtype=torch.float32)
        ctx.options = {"temperature": temperature, "entropy": want_entropy, "block": _BLOCK, "num_warps": _WARPS}
        _read[(count,)](logits, targets, results, count, size, **ctx.options)
        ctx.save_for_backward(logits, targets, results)
        return results[0], results[1] if want_entropy else None

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, targets, results = ctx.saved_tensors
        count, size = logits.shape
        slopes = torch.stack([torch.zeros_like(results[0]) if grad is None else grad for grad in grads])
        _overwrite[(count, triton.cdiv(size, _BLOCK))](logits, targets, results, slopes, count, size, **ctx.options)
        # If another function keeps these logits for its own backward pass, torch raises an error there.
        torch.autograd.graph.increment_version(logits)
        return logits, None, None, None


@triton.jit
def _read(logits, targets, results, count, size, temperature: tl.constexpr, entropy: tl.constexpr, block: tl.constexpr):
    """Write the results of one row: logprob of the target, entropy, maximum m, and log(sum(exp(logits - m)))."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    results += row
    largest = -1.0e30
    total = 0.0
    moment = 0.0
    for start in range(0, size, block):
        columns = start + tl.arange(0, block)
        scores = tl.load(logits + columns, columns < size, float("-inf")).to(tl.float32) / temperature
        before, largest = largest, tl.maximum(largest, tl.max(scores))
        shares = tl.exp(scores - largest)
        factor = tl.exp(before - largest)
        if entropy:
            moments = tl.where(shares > 0, shares * (scores - largest), 0.0)
            moment = factor * (moment + total * (before - largest)) + tl.sum(moments)
        total = total * factor + tl.sum(shares)
    target = tl.load(targets + row)
    # A target that is no token gets NaN, which ends the step.
    is_token = (target >= 0) & (target < size)
    chosen = tl.load(logits + target, is_token, float("nan")).to(tl.float32) / temperature
    tl.store(results, chosen - largest - tl.log(total))
    if entropy:
        tl.store(results + count, tl.log(total) - moment / total)
    tl.store(results + 2 * count, largest)
    tl.store(results + 3 * count, tl.log(total))


@triton.jit
def _overwrite(
    logits, targets, results, slopes, count, size, temperature: tl.constexpr, entropy: tl.constexpr, block: tl.constexpr
):
    """Replace a block of logits by their gradients. `slopes` [2, N] has those of the row's logprob and entropy."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    places = logits + row * size + columns
    results += row
    scores = tl.load(places, columns < size, float("-inf")).to(tl.float32) / temperature
    logprobs = scores - tl.load(results + 2 * count) - tl.load(results + 3 * count)
    shares = tl.exp(logprobs)
    slope = tl.load(slopes + row) * (tl.where(columns == tl.load(targets + row), 1.0, 0.0) - shares)
    if entropy:
        changes = tl.where(shares > 0, shares * (logprobs + tl.load(results + count)), 0.0)
        slope -= tl.load(slopes + count + row) * changes
    tl.store(places, slope / temperature, columns < size)
