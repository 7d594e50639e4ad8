"""The host never waits for the device within a micro-batch, and experts are computed there by grouped products.

Fake tensors have no values. So whatever needs a value or a count of tensors on the device raises an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import cross_entropy, lay_out, make_samples, no_other
from expert_models import random_experts, with_experts, write_expert_model
from model_families import family_of, tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from spurline.config.run_config import ModelConfig
from spurline.plugins.host import PluginHost
from spurline.protocols.loss import Loss
from spurline_models.accumulate import accumulate_gradients
from spurline_models.device_profile import device_profile
from spurline_models.loading import load_model
from spurline_models.streams import segment_attention
from spurline_models.streams.stream_model import StreamModel
from spurline_models.streams.token_stream import TokenStream, token_stream
from spurline_models.testing import LossContract
from spurline_ranks.sequence_sharing import SequenceSharing

PROFILE = device_profile("cpu", "bf16")
WAITS = (DataDependentOutputException, DynamicOutputShapeException)
SAMPLES = make_samples([3, 7, 12, 5, 9], seed=3)
REGISTRY = PluginHost.load([]).registry
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "dpo": [{"loss_type": "ipo"}, {"sft_weight": 0.1, "label_smoothing": 0.1}],
    "ppo": [{"dual_clip": 3.0, "kl": {"coefficient": 0.1}, "entropy_coefficient": 0.1}],
    "policy_gradient": [{"importance_ratio": True}],
}


class Counted(TorchDispatchMode):
    """The names of the operations in the context, and the dtypes of grouped products."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.grouped: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        if "grouped_mm" in func._schema.name:
            self.grouped |= {args[0].dtype, args[1].dtype}
        return func(*args, **(kwargs or {}))


@contextmanager
def without_values() -> Iterator[Callable[[Tensor], Tensor]]:
    """Yield a function that makes tensors of the device. They have no values."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode.from_tensor


def on_device(model: nn.Module, send: Callable[[Tensor], Tensor]) -> None:
    for module in model.modules():
        for name, value in module._parameters.items():
            module._parameters[name] = None if value is None else nn.Parameter(send(value.detach()))
        for name, value in module._buffers.items():
            module._buffers[name] = None if value is None else send(value)


def sent(stream: TokenStream, send: Callable[[Tensor], Tensor]) -> TokenStream:
    """Only what `TokenStream` says to be on the host keeps its values."""
    tensors = {
        name: send(value) for name, value in vars(stream).items() if isinstance(value, Tensor) and name != "batch_index"
    }
    buckets = [replace(one, slots=None if one.slots is None else send(one.slots)) for one in stream.plan.buckets]
    plan = replace(stream.plan, cu_seqlens=send(stream.plan.cu_seqlens), buckets=tuple(buckets))
    return replace(stream, plan=plan, **tensors)


@pytest.fixture(autouse=True)
def varlen_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a GPU. The kernel has fake tensors on every device.
    def fits(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> bool:
        return query.shape[-1] == value.shape[-1]

    monkeypatch.setattr(segment_attention, "_varlen_kernel_fits", fits)


def trained(model: StreamModel, stream: TokenStream, balance: float | None = None) -> Counted:
    with Counted() as counted:
        accumulate_gradients(model, [(np.arange(1), stream)], cross_entropy(), PROFILE, no_other, balance=balance)
    return counted


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_a_training_pass_never_waits_and_computes_experts_in_half_precision(model_type: str, tmp_path: Path) -> None:
    family = family_of(model_type)
    tiny_model(family).config.save_pretrained(tmp_path)
    model = StreamModel(load_model(ModelConfig(path=str(tmp_path), init="random"), PROFILE, 0))
    model.read_as(family.reading)
    stream = token_stream(lay_out(SAMPLES), np.arange(len(SAMPLES)), (), PROFILE)
    assert stream is not None
    with without_values() as send:
        on_device(model.causal, send)
        counted = trained(model, sent(stream, send))
    assert counted.grouped == ({torch.bfloat16} if "experts" in family.has else set())


def test_experts_are_replayed_balanced_and_counted_without_a_wait(tmp_path: Path) -> None:
    model = StreamModel(load_model(ModelConfig(path=str(write_expert_model(tmp_path)), init="random"), PROFILE, 0))
    batch = with_experts(lay_out(SAMPLES), random_experts(SAMPLES))
    stream = token_stream(batch, np.arange(len(SAMPLES)), (), PROFILE)
    assert stream is not None
    with without_values() as send:
        on_device(model.causal, send)
        counted = trained(model, sent(stream, send), balance=0.1)
    assert counted.grouped == {torch.bfloat16}


def test_ranks_share_a_stream_without_a_wait() -> None:
    stream = token_stream(lay_out(SAMPLES), np.arange(len(SAMPLES)), (), PROFILE)
    assert stream is not None
    wanted, mine = SequenceSharing(None, PROFILE).part_of(stream, multiple=16)
    with without_values() as send:
        part, found = SequenceSharing(None, PROFILE).part_of(sent(stream, send), multiple=16)
    assert found == mine
    assert part.source.shape == wanted.source.shape
    assert part.host_source.tolist() == wanted.source.tolist()


LOSSES = [
    pytest.param(name, settings, id="-".join([name, *settings]))
    for name in REGISTRY.names("loss")
    for settings in [{}, *SETTINGS.get(name, [])]
]


@pytest.mark.parametrize(("name", "settings"), LOSSES)
def test_a_loss_never_waits(name: str, settings: dict[str, Any]) -> None:
    loss: Loss = REGISTRY.create("loss", REGISTRY.get("loss", name).config(**settings))

    class Inputs(LossContract):
        def make_loss(self) -> Loss:
            return loss

    inputs = Inputs().inputs()
    with without_values() as send:
        columns = {column: send(values) for column, values in inputs.columns.items()}
        entropy = None if inputs.entropy is None else send(inputs.entropy)
        fake = replace(
            inputs,
            logprobs=send(inputs.logprobs),
            segment_index=send(inputs.segment_index),
            columns=columns,
            entropy=entropy,
        )
        loss.token_loss(fake).sum().backward()
        with torch.no_grad():
            loss.metrics(fake)


def test_a_wait_would_be_found() -> None:
    with without_values() as send, pytest.raises(WAITS):
        torch.bincount(send(torch.tensor([0, 1, 1])), minlength=2)
    with without_values() as send, pytest.raises(WAITS):
        send(torch.ones(2)).tolist()
