"""Each family of models has, packed into one batch, the gradients of plain transformers for each sequence alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backend_batches import lay_out, make_samples
from model_families import FAMILIES, MARKED, PAGE, Family, family_of, table, taken_gradients, tiny_model
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_models.architecture import build_without_memory
from spurline_models.device_profile import device_profile
from spurline_models.probe import check_exactness
from spurline_models.streams.stream_model import StreamModel, idle_pass
from spurline_models.streams.token_stream import Bucket, SegmentPlan, cut_buckets, token_stream
from spurline_rl.testing.backend_cases import assert_gradients_close

# Shorter and longer than the windows and chunks of 5, equal lengths, and one token alone.
SAMPLES = make_samples([3, 7, 7, 12, 5, 19, 1, 9], seed=3, loss_share=1.1)
ROWS = [[0, 1, 2], [3], [4, 5], [6, 7]]


def one_at_a_time(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """As transformers alone has them."""
    model.set_attn_implementation("eager")
    for sample in SAMPLES:
        if len(sample.tokens) > 1:
            tokens, weights = torch.tensor([sample.tokens]), torch.tensor(sample.weights[1:])
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
            (F.cross_entropy(logits, tokens[0, 1:], reduction="none") * weights).sum().backward()
    return taken_gradients(model)


def as_a_batch(model: StreamModel) -> list[tuple[str, Tensor]]:
    stream = token_stream(lay_out(SAMPLES, ROWS, gap=2), np.arange(len(ROWS)), (), device_profile("cpu"))
    assert stream is not None
    (-model.loss_inputs(stream, ()).logprobs * stream.weights).sum().backward()
    return taken_gradients(model.causal)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_a_batch_has_the_gradients_of_each_sequence_alone(family: Family) -> None:
    model = tiny_model(family).train()
    wanted = one_at_a_time(model)
    read = StreamModel(model, chunk_tokens=16)
    check_exactness(read, device_profile("cpu"), family.model_type)
    assert read.reading == family.reading
    assert_gradients_close(as_a_batch(read), wanted, 1e-5, cancels_below=1e-3)


def test_rows_of_one_pass_and_of_many_and_idle_ones_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StreamModel(tiny_model(family_of("qwen3_5_text")).train(), chunk_tokens=16)
    model.read_as("rows")
    wanted = as_a_batch(model)
    passes: list[int] = []

    def many(plan: SegmentPlan, device: torch.device) -> list[Bucket]:
        # Never worth padding: a pass for each length.
        found = cut_buckets(plan.lengths, 0, Tensor.contiguous, most_padding=1.0)
        passes.append(len(found))
        return [*found, idle_pass(int(plan.lengths.sum()), Tensor.contiguous)]

    monkeypatch.setattr(model, "_row_passes", many)
    assert_gradients_close(as_a_batch(model), wanted, 1e-5, cancels_below=1e-3)
    assert passes == [7]


@pytest.mark.parametrize(
    "lengths", [[1] * 4000 + [*range(2, 60)], [3] * 200 + [1000], [*range(100, 1000, 14)], [7], [2, 300]]
)
def test_large_passes_have_at_most_as_much_padding_as_tokens(lengths: list[int]) -> None:
    passes = cut_buckets(np.array(lengths), 8192, Tensor.contiguous, most_padding=1.0)
    assert [one.start for one in passes] == [0, *(one.start + one.tokens for one in passes[:-1])]
    assert passes[-1].start + passes[-1].tokens == sum(lengths)
    for one in passes:
        slots = one.count * one.length
        assert slots <= 8192 or slots <= 2 * one.tokens


def test_the_page_has_the_table_of_these_families() -> None:
    found = MARKED.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table(), "run python tests/support/model_families.py"


def test_a_model_that_sees_and_has_no_causal_language_model_inside_is_refused() -> None:
    with pytest.raises(ModelError, match=r"also sees or hears.*Choose a text model"):
        build_without_memory(AutoConfig.for_model("qwen3_vl"), ModelConfig(path="seeing"))
