"""Logits exist only where there is loss, a chunk at a time."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_batches import VOCABULARY, cross_entropy, excite, lay_out, local_backend, make_samples, write_model_folder
from read_distributions import ReadsEverything, expected_values, total_of
from torch import nn

from spurline.errors import ModelError
from spurline_models.streams.token_logprobs import LogitReading, ReadStates, TokenLogprobs


@pytest.mark.parametrize("chunk_tokens", [1, 3, 10, 4096])
def test_the_output_layer_never_sees_more_than_a_chunk_and_never_a_prompt(tmp_path: Path, chunk_tokens: int) -> None:
    backend = excite(local_backend(write_model_folder(tmp_path / "model"), logits_chunk_tokens=chunk_tokens))
    batch = lay_out(make_samples([20, 30, 25], loss_share=0.5), [[0, 1], [2]])
    sizes: list[int] = []
    head: Any = backend._model.head
    head.register_forward_hook(lambda module, arguments, output: sizes.append(output[..., 0].numel()))
    biggest = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal biggest
        if tensor.shape[-1:] == (VOCABULARY,) and tensor.data_ptr() != head.weight.data_ptr():
            biggest = max(biggest, tensor[..., 0].numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        backend.update(batch, cross_entropy(5.0))
    assert max(sizes) <= chunk_tokens
    assert biggest <= min(chunk_tokens, batch.num_loss_tokens)
    # All chunks but the last are computed again in the backward pass.
    assert len(sizes) == 2 * math.ceil(batch.num_loss_tokens / chunk_tokens) - 1


@pytest.mark.parametrize("want_entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
@pytest.mark.parametrize("cut", [False, True])
def test_chunks_give_the_values_and_gradients_of_full_logits(
    want_entropy: bool, bias: bool, temperature: float, cut: bool
) -> None:
    """With `cut`, logprobs are those of the softmax over the tokens that sampling kept, written out with -inf."""
    torch.manual_seed(0)
    head = nn.Linear(6, 11, bias=bias, dtype=torch.float64)
    hidden = torch.randn(23, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (23,))
    inputs = [hidden, *head.parameters()]
    kept = torch.rand(23, 11) < 0.3
    kept[torch.arange(23), targets] = True
    support = torch.where(kept, torch.arange(11), -1) if cut else None
    logprobs, entropy = TokenLogprobs(head, 5)(hidden, targets, want_entropy, temperature, support)
    full = (head(hidden) / temperature).log_softmax(-1)
    sampled_from = full.masked_fill(~kept, -torch.inf).log_softmax(-1) if cut else full
    expected = sampled_from[torch.arange(23), targets]
    total, expected_total = (logprobs**2).sum(), (expected**2).sum()
    torch.testing.assert_close(logprobs, expected)
    if want_entropy:
        assert entropy is not None
        torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))
        total, expected_total = total + (entropy**2).sum(), expected_total + ((full.exp() * full).sum(-1) ** 2).sum()
    else:
        assert entropy is None
    got, wanted = torch.autograd.grad(total, inputs), torch.autograd.grad(expected_total, inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_a_likely_token_of_a_support_has_the_gradient_of_its_logit_in_half_precision() -> None:
    logits = torch.tensor([[9.0, 3.0, 1.0, 8.0]], dtype=torch.bfloat16, requires_grad=True)
    exact = logits.detach().float().requires_grad_()
    support, targets = torch.tensor([[1, 0, -1]]), torch.tensor([0])
    TokenLogprobs(lambda hidden: hidden, 4)(logits, targets, support=support)[0].sum().backward()
    exact[:, :2].log_softmax(-1)[:, 0].sum().backward()
    assert logits.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(logits.grad.float(), exact.grad, rtol=2**-8, atol=0)


def test_a_loss_cannot_make_a_column_that_the_batch_has() -> None:
    stream: Any = SimpleNamespace(targets=torch.tensor([0]), columns={"scale": torch.ones(1)}, support=None)
    loss: Any = SimpleNamespace(from_logits=lambda policy, others, columns: {"scale": 2 * columns["scale"]})
    with pytest.raises(ModelError, match=r"makes scale, which its inputs already have"):
        TokenLogprobs(nn.Linear(2, 3), 4).read(torch.ones(1, 2), stream, LogitReading(loss, {}), False, 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("vocabularies", [(11, 11), (11, 13), (13, 11)])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 4096])
def test_a_loss_that_reads_logits_gets_the_values_and_gradients_of_full_logits(
    chunk_tokens: int, vocabularies: tuple[int, int], fused: bool
) -> None:
    torch.manual_seed(0)
    head, other = (nn.Linear(size, v, dtype=torch.float64) for size, v in zip((6, 4), vocabularies, strict=True))
    hidden = torch.randn(23, 6, dtype=torch.float64, requires_grad=True)
    states = torch.randn(23, 4, dtype=torch.float64, requires_grad=True)
    targets, scale = torch.randint(11, (23,)), torch.rand(23, dtype=torch.float64)
    # A loss that reads logits takes no kernel, which would overwrite them.
    layer = TokenLogprobs(head, chunk_tokens, fused)
    stream: Any = SimpleNamespace(targets=targets, columns={"scale": scale}, support=None)
    reading = LogitReading(ReadsEverything(), {"reference": ReadStates(TokenLogprobs(other, 2), states)})
    logprobs, entropy, values = layer.read(hidden, stream, reading, True, 0.7)
    assert entropy is not None
    own = (head(hidden) / 0.7).log_softmax(-1)
    expected = expected_values(head(hidden) / 0.7, other(states).detach() / 0.7, targets, scale)
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(values[name], value, msg=name)
    inputs = [hidden, *head.parameters()]
    of_targets, own_entropy = own[torch.arange(23), targets], -(own.exp() * own).sum(-1)
    got = torch.autograd.grad(total_of(values, logprobs, entropy), inputs)
    wanted = torch.autograd.grad(total_of(expected, of_targets, own_entropy), inputs)
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two)
    assert states.grad is None


def test_dropout_in_the_output_layer_is_the_same_when_recomputed() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Dropout(0.5), nn.Linear(6, 11, dtype=torch.float64))
    hidden = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (8,))
    torch.manual_seed(1)
    logprobs, _ = TokenLogprobs(head, 4)(hidden, targets)
    (chunked,) = torch.autograd.grad(logprobs.sum(), hidden)
    torch.manual_seed(1)
    parts = [
        head(part).log_softmax(-1)[torch.arange(4), target]
        for part, target in zip(hidden.split(4), targets.split(4), strict=True)
    ]
    (plain,) = torch.autograd.grad(torch.cat(parts).sum(), hidden)
    torch.testing.assert_close(chunked, plain)
