"""On GPUs, attention in half precision is computed by torch's kernel for streams, or a run says why not."""

from __future__ import annotations

from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from spurline_models.streams import segment_attention
from spurline_models.streams.segment_attention import Scores, attend_segments
from spurline_models.streams.stream_model import StreamModel
from spurline_models.streams.token_stream import plan_segments
from spurline_models.testing.inputs import write_tiny_model


def kernel_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The results of torch's kernel, with the arguments that it has in torch 2.11."""
    assert window_size == (-1, 0)
    outputs = []
    for start, end in pairwise(cu_seq_q.tolist()):
        parts = [part[start:end].transpose(0, 1) for part in (query, key, value)]
        output = F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def kernel_of_torch_2_13(query: Tensor, key: Tensor, *parts: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    assert enable_gqa or query.shape[1] == key.shape[1], "torch 2.13 refuses this"
    return kernel_of_torch_2_11(query, key, *parts, **options)


@pytest.fixture
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.mark.usefixtures("_on_a_gpu")
@pytest.mark.parametrize("kernel", [kernel_of_torch_2_11, kernel_of_torch_2_13])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_each_torch_computes_grouped_heads_by_its_kernel(
    kernel: Any, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(key_heads)
    plan = plan_segments(torch.tensor([3, 5, 8]).numpy(), 10**9, lambda tensor: tensor)
    shapes = [(16, heads, 16) for heads in (4, key_heads, key_heads)]
    query, key, value = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    calls: list[int] = []

    # Keeps the kernel's signature.
    @wraps(kernel)
    def counted(*given: Any, **named: Any) -> Tensor:
        calls.append(1)
        return kernel(*given, **named)

    monkeypatch.setattr(segment_attention, "varlen_attn", counted)
    found = attend_segments(query, key, value, plan, Scores(0.3))
    assert calls == [1]
    padded = attend_segments(query.float(), key.float(), value.float(), plan, Scores(0.3))
    assert calls == [1]
    assert float((found - padded).abs().max()) <= 0.05


@pytest.mark.usefixtures("_on_a_gpu")
def test_a_run_on_a_gpu_says_why_it_does_not_use_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def model(name: str, **settings: Any) -> StreamModel:
        folder = write_tiny_model(tmp_path / name, **{"head_dim": 16, **settings})
        return StreamModel(AutoModelForCausalLM.from_pretrained(folder))

    plain = model("plain")
    assert "pads" not in plain.facts(torch.bfloat16)
    assert "precision: bf16" in plain.facts(torch.float32)["pads"]
    assert "multiple of 8" in model("narrow", head_dim=12).facts(torch.bfloat16)["pads"]
    assert "dropout" in model("dropout", attention_dropout=0.1).facts(torch.bfloat16)["pads"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "Ampere" in plain.facts(torch.bfloat16)["pads"]
    monkeypatch.undo()
    assert "pads" not in plain.facts(torch.float32)
