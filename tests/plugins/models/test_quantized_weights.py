"""Frozen weights in 4 bits: what is computed is what the values that they stand for compute."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import held_weights
import pytest
import torch
from backend_batches import lay_out, make_samples, run_config, write_model_folder
from held_weights import OBJECTIVE, train, write_fp32_files
from model_families import FAMILIES, tiny_model

from spurline.config.run_config import ModelConfig
from spurline.errors import CheckpointError, ConfigError, ModelError
from spurline_models import configs
from spurline_models.configs import LoraConfig, adapter_page
from spurline_models.local.backend import LocalBackend
from spurline_models.local.checkpoint import read_weights
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.placement.narrow_weights import quantize_weights
from spurline_models.placement.quantized_weights import QuantizedWeight, quantized_bytes, quantized_layers


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model whose files hold fp32, with biases."""
    return write_fp32_files(tmp_path / "model", model_type="qwen2", architectures=["Qwen2ForCausalLM"])


@pytest.fixture
def adapted() -> Callable[..., LocalBackend]:
    def make(folder: Path, base_dtype: str = "nf4", dora: bool = False, **settings: Any) -> LocalBackend:
        return held_weights.adapted(folder, base_dtype, dora, **settings)

    return make


def test_a_model_without_linear_layers_is_not_held_wide_in_silence(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.model_type == "gpt2")
    with pytest.raises(ModelError, match=r"base_dtype: GPT2LMHeadModel has no linear layers.*base_dtype: bf16"):
        quantize_weights(tiny_model(family), torch.float32)


@pytest.mark.parametrize("shape", [(3, 5), (10, 6), (7, 100), (64, 33), (1000, 77), (300, 64)], ids=str)
def test_a_weight_is_held_in_the_bytes_that_are_said_and_each_value_is_a_code_times_its_scale(
    shape: tuple[int, int],
) -> None:
    import bitsandbytes.functional as quantization

    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    held = QuantizedWeight.of(values)
    assert sum(part.nbytes for _, part in held.named("weight")) == quantized_bytes(values.numel())
    codes = torch.stack([held.codes >> 4, held.codes & 15], 1).view(-1)[: values.numel()].long()
    scales = held.table[held.scales.long()] * held.outer_scales.repeat_interleave(256)[: len(held.scales)] + held.offset
    ladder = quantization.get_4bit_type("nf4", device="cpu")
    expected = (ladder[codes] * scales.repeat_interleave(64)[: values.numel()]).view(shape)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert torch.equal(held.values(dtype), expected.to(dtype))
    # Half the widest step between two codes, and what rounding a scale adds.
    assert ((expected - values).abs() <= 0.17 * values.abs().max()).all()


@pytest.mark.parametrize(("precision", "dora"), [("fp32", False), ("fp32", True), ("bf16", False), ("fp64", False)])
def test_training_over_quantized_weights_is_training_over_their_values_held_wide_bit_for_bit(
    files: Path, tmp_path: Path, adapted: Callable[..., LocalBackend], precision: str, dora: bool
) -> None:
    quantized = adapted(files, dora=dora, precision=precision)
    assert len(quantized_layers(quantized._model.causal)) == 14
    # Its adapters are 0 yet; DoRA's lengths, which are not, only say again how long the rows are.
    plain = quantized if not dora else adapted(files)
    values = write_model_folder(tmp_path / "values", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    plain.write_weights(values, torch.float32, 1 << 30)
    wide = adapted(values, "fp32", dora=dora, precision=precision, activation_checkpointing=True)
    assert train(quantized, range(2)) == train(wide, range(2))
    batch = lay_out(make_samples([9, 12, 20, 3]))
    gradients = [dict(backend.gradients(batch, OBJECTIVE)) for backend in (quantized, wide)]
    weights = [dict(backend.named_weights()) for backend in (quantized, wide)]
    for got, expected in (gradients, weights):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name].to(value), value) for name, value in expected.items())
    assert quantized.facts() == wide.facts()


def test_gradients_over_quantized_weights_do_not_depend_on_the_layout(
    files: Path, adapted: Callable[..., LocalBackend]
) -> None:
    backend = adapted(files, probe=True, activation_checkpointing=True)
    train(backend, range(1))
    samples = make_samples([9, 12, 20, 3])
    packed = dict(backend.gradients(lay_out(samples, [[0, 1, 2, 3]]), OBJECTIVE))
    for name, gradient in backend.gradients(lay_out(samples, length=32), OBJECTIVE):
        assert torch.linalg.vector_norm(gradient - packed[name]) <= 3e-6 * torch.linalg.vector_norm(packed[name]), name


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_run_over_quantized_weights_goes_on_bit_for_bit_and_is_exported_from_its_checkpoint(
    files: Path, tmp_path: Path, adapted: Callable[..., LocalBackend], dora: bool
) -> None:
    backend, resumed = (adapted(files, dora=dora) for _ in range(2))
    initial = backend.logprobs(lay_out(make_samples([9, 12])), role="reference")
    torch.testing.assert_close(backend.logprobs(lay_out(make_samples([9, 12]))), initial, atol=1e-5, rtol=0)
    train(backend, range(2))
    backend.save(tmp_path / "saved")
    run = run_config(files, model=ModelConfig(path=str(files)), backend=backend._config)
    read = dict(read_weights(run, tmp_path / "saved", {}).tensors)
    # Copies: those that leave may be the model's own, whose memory is given away below.
    weights = {name: value.clone() for name, value in backend.named_weights()}
    assert read.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in read.items())
    # While engines have the device's memory, a publish reads the same from the host's.
    backend.yield_device(keep_weights=False)
    assert all(torch.equal(value, weights[name]) for name, value in backend.named_weights())
    backend.take_device()
    expected = train(backend, range(2, 4))
    resumed.load(tmp_path / "saved")
    assert train(resumed, range(2, 4)) == expected
    for other in ("auto", "bf16"):
        with pytest.raises(CheckpointError, match=r"other frozen weights.*base_dtype"):
            adapted(files, other, dora=dora).load(tmp_path / "saved")


def test_quantized_weights_of_another_model_are_recognised_by_their_scales(
    files: Path, tmp_path: Path, adapted: Callable[..., LocalBackend]
) -> None:
    adapted(files).save(tmp_path / "saved")
    other = adapted(files)
    layer = next(iter(quantized_layers(other._model.causal).values()))
    # The codes stay what they are.
    layer.get_buffer("weight_outer_scales").mul_(2)
    with pytest.raises(CheckpointError, match="other frozen weights"):
        other.load(tmp_path / "saved")


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "fp64"}], ids=str)
def test_memory_of_quantized_weights_is_estimated_exactly(
    files: Path, adapted: Callable[..., LocalBackend], settings: dict[str, Any]
) -> None:
    backend = adapted(files, **settings)
    causal = backend._model.causal
    scales = sum(part.nbytes for layer in quantized_layers(causal).values() for part in layer.buffers(recurse=False))
    run = run_config(files, model=ModelConfig(path=str(files)))
    parts = LocalBackendConfig(lora=backend._config.lora, **settings).estimate_memory(run, 100, 100)
    assert parts["weights"] == sum(value.nbytes for value in causal.parameters()) + scales
    assert parts["gradients"] == sum(value.nbytes for value in backend._policy.parameters.values())


def test_a_plan_suggests_quantized_weights_last() -> None:
    config = LocalBackendConfig(lora=LoraConfig(rank=4), activation_checkpointing=True)
    assert list(config.savings(run_config("m"), 10, 10))[-1] == {"lora.base_dtype": "nf4"}


def test_the_page_of_an_adapter_says_which_base_it_belongs_to() -> None:
    page = adapter_page(ModelConfig(path="a/model", revision="v1"), LoraConfig(base_dtype="nf4"))
    assert '\nbase_model: "a/model"\n' in page
    assert "`a/model`, revision `v1`" in page
    assert "quantized to 4 bits" in page
    assert "quantized" not in adapter_page(ModelConfig(path="a/model"), LoraConfig())


def test_engines_are_sent_the_merged_weights() -> None:
    assert LoraConfig(base_dtype="bf16").is_added
    assert not LoraConfig(base_dtype="nf4").is_added


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "find_spec", lambda name: None if name == "bitsandbytes" else object())
    with pytest.raises(ConfigError, match=r"base_dtype.*bitsandbytes.*spurline-models\[qlora\]"):
        LocalBackendConfig(lora=LoraConfig(base_dtype="nf4")).check_model(run_config("m"))
