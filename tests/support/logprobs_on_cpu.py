"""Compare the Triton kernels for logprobs with PyTorch in fp64, on a CPU through Triton's interpreter.

python tests/support/logprobs_on_cpu.py     prints {case: [difference of values, relative difference of gradients]}
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

from spurline_models.streams import logprob_kernel
from spurline_models.streams.token_logprobs import TokenLogprobs

TOKENS, VOCABULARY = 11, 150


def scores(head: nn.Linear, hidden: Tensor, chunk_tokens: int, want_entropy: bool, temperature: float) -> list[Tensor]:
    """Return the logprobs, the entropies, and the gradients of a sum with different weights for each token."""
    fused = hidden.dtype != torch.float64
    targets = torch.arange(TOKENS) * 13 % VOCABULARY
    found, entropy = TokenLogprobs(head, chunk_tokens, fused)(hidden, targets, want_entropy, temperature)
    weights = torch.linspace(-1, 2, TOKENS)
    total = (found * weights).sum() + (0 if entropy is None else (entropy * weights.flip(0)).sum())
    return [found, *([] if entropy is None else [entropy]), *torch.autograd.grad(total, [hidden, head.weight])]


def compare(dtype: torch.dtype, want_entropy: bool, temperature: float, chunk_tokens: int) -> tuple[float, float]:
    torch.manual_seed(0)
    # The hidden states are unit vectors, so that each token has its own column of logits.
    logits = 3 * torch.randn(TOKENS, VOCABULARY)
    head = nn.Linear(TOKENS, VOCABULARY, bias=False).to(dtype)
    head.weight.data = logits.T.to(dtype)
    exact = nn.Linear(TOKENS, VOCABULARY, bias=False, dtype=torch.float64)
    exact.weight.data = head.weight.data.double()
    arguments: Any = (chunk_tokens, want_entropy, temperature)
    found = scores(head, torch.eye(TOKENS, dtype=dtype, requires_grad=True), *arguments)
    wanted = scores(exact, torch.eye(TOKENS, dtype=torch.float64, requires_grad=True), *arguments)
    pairs = [(one.detach().double(), other.detach()) for one, other in zip(found, wanted, strict=True)]
    worst = max(float((one - other).abs().max()) for one, other in pairs[:-2])
    return worst, max(float((one - other).norm() / other.norm()) for one, other in pairs[-2:])


def error_if_others_keep_logits() -> str:
    """Return the error of a model whose last function would read its own output in the backward pass."""
    logits = torch.randn(2, VOCABULARY, requires_grad=True).tanh()
    logprobs: Any = logprob_kernel.FusedLogprobs.apply(logits, torch.tensor([1, 2]), False, 1.0)
    try:
        logprobs[0].sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    # Several blocks, the last of which is not full.
    logprob_kernel._BLOCK = 64
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    cases = [(name, *options) for name in dtypes for options in [(False, 1.0, 4), (True, 0.7, 4), (True, 1.0, TOKENS)]]
    found: dict[str, Any] = {str(case): compare(dtypes[case[0]], *case[1:]) for case in cases}
    print(json.dumps({"cases": found, "error": error_if_others_keep_logits()}))
