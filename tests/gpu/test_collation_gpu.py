"""Batches of the fast collators lie in pinned memory, so that copies to the GPU need not wait."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("spurline_collation_fast")

from spurline.data.collators.reference import PackedCollator
from spurline.data.configs import PackedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.testing.collator_contract import assert_batches_equal
from spurline.testing.samples import make_view
from spurline_collation_fast.collators import FastPackedCollator

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG, PAD, LAYOUT = PackedCollatorConfig(max_tokens=64), 0, ParallelLayout()


def test_columns_are_pinned_once_the_process_uses_the_gpu() -> None:
    torch.cuda.init()
    batch = FastPackedCollator(CONFIG, PAD, LAYOUT).collate(make_view([9, 30, 41]), training=True)
    for column in batch.tokens.values():
        assert column.is_pinned()
        assert column.pin_memory().data_ptr() == column.data_ptr(), "pinning again copied"
    assert_batches_equal(batch, PackedCollator(CONFIG, PAD, LAYOUT).collate(make_view([9, 30, 41]), training=True))
