"""Hashes of weights and rows: each flipped bit changes them, and layout does not."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from spurline.data.collators.reference import PackedCollator, PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.testing.samples import make_view
from spurline_lineage.fingerprints import rows_hash, tensor_hash, weights_hash

BLOCK = 1 << 16


def words_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (7, 11), (3, BLOCK - 1), (1, 9 * BLOCK + 5)])
def test_each_flipped_bit_changes_the_hash_of_a_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    drawn = random.Random(5)
    tensor = (torch.arange(torch.Size(shape).numel()) % 251).to(dtype).view(shape)
    whole = tensor_hash("w", tensor)
    places = {0, len(words_of(tensor)) - 1, *(drawn.randrange(len(words_of(tensor))) for _ in range(10))}
    for place in places:
        for bit in range(8):
            words_of(tensor)[place] ^= 1 << bit
            assert tensor_hash("w", tensor) != whole, (place, bit)
            words_of(tensor)[place] ^= 1 << bit
    assert tensor_hash("w", tensor) == whole
    assert tensor_hash("v", tensor) != whole


def test_two_changes_that_cancel_in_a_plain_sum_change_the_hash() -> None:
    tensor = torch.randn(20, BLOCK)
    whole = tensor_hash("w", tensor)
    drawn = random.Random(2)
    for _ in range(50):
        one, other = (drawn.randrange(tensor.numel()) for _ in range(2))
        changed = tensor.clone()
        # The signs of two numbers, whose bits are the highest of their words.
        changed.view(-1)[[one, other]] *= -1
        assert tensor_hash("w", changed) != whole
        changed = tensor.clone()
        changed.view(-1)[one], changed.view(-1)[other] = float(tensor.view(-1)[other]), float(tensor.view(-1)[one])
        assert (tensor_hash("w", changed) != whole) == (one != other)


def test_the_hash_of_weights_depends_neither_on_the_order_of_tensors_nor_on_strides() -> None:
    one, other = torch.randn(30, 40), torch.randn(17)
    straight = weights_hash([("a", one), ("b", other)])
    assert straight == weights_hash([("b", other), ("a", one.t().contiguous().t())])
    assert straight != weights_hash([("a", other), ("b", one)])


def test_the_hash_of_rows_depends_on_tokens_and_weights_and_not_on_packing() -> None:
    samples, layout = make_view([5, 9, 3, 12, 7]), ParallelLayout()
    packed = PackedCollator(PackedCollatorConfig(max_tokens=24), 0, layout).collate(samples, training=True)
    padded = PaddedCollator(PaddedCollatorConfig(), 0, layout).collate(samples, training=True)
    padded = padded.take([3, 0, 4, 1, 2])
    assert rows_hash(packed) == rows_hash(padded)
    for name in ("input_ids", "loss_weights"):
        column = padded.tokens[name].clone()
        column[0, 1] += 1
        assert rows_hash(padded.with_tokens(**{name: column})) != rows_hash(padded)
