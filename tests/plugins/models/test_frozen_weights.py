"""Frozen weights under adapters in half precision or in 4 bits: less memory, and not a bit of difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from backend_batches import lay_out, local_backend, make_samples, run_config, write_model_folder
from held_weights import OBJECTIVE, adapted, round_files, train, write_fp32_files
from model_families import family_of, tiny_model
from safetensors.torch import load_file, save_file
from torch import nn

from spurline.config.run_config import ModelConfig
from spurline.errors import CheckpointError, ConfigError, ModelError
from spurline_models import configs
from spurline_models.configs import LoraConfig
from spurline_models.local.checkpoint import read_weights
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.placement.narrow_weights import narrow_weights, narrowable_modules, quantize_weights
from spurline_models.placement.quantized_weights import QuantizedWeight, quantized_bytes, quantized_layers

QWEN2: dict[str, Any] = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
"""A model with biases."""
BATCH = lay_out(make_samples([9, 12, 20, 3]))

forms = pytest.mark.parametrize("form", ["bf16", "nf4"])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model whose files hold fp32 values that bf16 does not have."""
    return write_fp32_files(tmp_path / "model", **QWEN2)


def mamba(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A model that rounds what it computes to the dtype of a weight."""
    tiny_model(family_of("mamba")).to(dtype).save_pretrained(folder)
    return folder


@forms
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_training_over_them_is_training_over_the_same_values_held_wide_bit_for_bit(
    files: Path, tmp_path: Path, form: Literal["bf16", "nf4"], precision: str
) -> None:
    if form == "bf16":
        held, wide = (adapted(round_files(files), dtype, precision=precision) for dtype in ("auto", "fp32"))
        frozen = {value.dtype for name, value in held._model.causal.named_parameters() if "layer.weight" in name}
        assert frozen == {torch.bfloat16}
    else:
        held = adapted(files, form, precision=precision)
        assert len(quantized_layers(held._model.causal)) == 14
        values = write_model_folder(tmp_path / "values", **QWEN2)
        held.write_weights(values, torch.float32, 1 << 30)
        wide = adapted(values, "fp32", precision=precision, activation_checkpointing=True)
    assert train(held, range(2)) == train(wide, range(2))
    if form == "bf16":
        held.save(tmp_path / "saved")
        wide.load(tmp_path / "saved")
        assert train(held, range(2, 4)) == train(wide, range(2, 4)), "a run goes on with either"
    gradients = [dict(backend.gradients(BATCH, OBJECTIVE)) for backend in (held, wide)]
    weights = [dict(backend.named_weights()) for backend in (held, wide)]
    for got, expected in (gradients, weights):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name].to(value), value) for name, value in expected.items())
    assert held.facts() == wide.facts()


@forms
def test_a_run_goes_on_bit_for_bit_and_is_exported_from_its_checkpoint(files: Path, tmp_path: Path, form: str) -> None:
    backend, resumed = (adapted(files, form) for _ in range(2))
    initial = backend.logprobs(BATCH, role="reference")
    torch.testing.assert_close(backend.logprobs(BATCH), initial, atol=1e-5, rtol=0)
    train(backend, range(2))
    backend.save(tmp_path / "saved")
    run = run_config(files, model=ModelConfig(path=str(files)), backend=backend._config)
    read = dict(read_weights(run, tmp_path / "saved", {}).tensors)
    # Copies: those that leave may be the model's own, whose memory is given away below.
    weights = {name: value.float().clone() for name, value in backend.named_weights()}
    assert read.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in read.items())
    # While engines have the device's memory, a publish reads the same from the host's.
    backend.yield_device(keep_weights=False)
    assert all(torch.equal(value.float(), weights[name]) for name, value in backend.named_weights())
    backend.take_device()
    expected = train(backend, range(2, 4))
    resumed.load(tmp_path / "saved")
    assert train(resumed, range(2, 4)) == expected
    for other in {"auto", "bf16"} - {form}:
        with pytest.raises(CheckpointError, match=r"other frozen weights.*base_dtype"):
            adapted(files, other).load(tmp_path / "saved")


@forms
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_their_memory_is_estimated_exactly(files: Path, form: str, precision: Any) -> None:
    backend = adapted(files, form, precision=precision)
    causal = backend._model.causal
    scales = sum(part.nbytes for layer in quantized_layers(causal).values() for part in layer.buffers(recurse=False))
    run = run_config(files, model=ModelConfig(path=str(files)))
    parts = LocalBackendConfig(lora=backend._config.lora, precision=precision).estimate_memory(run, 100, 100).parts
    assert parts["weights"] == sum(value.nbytes for value in causal.parameters()) + scales
    assert parts["gradients"] == sum(value.nbytes for value in backend._policy.parameters.values())


@pytest.mark.parametrize("shape", [(3, 5), (10, 6), (7, 100), (64, 33), (300, 64)], ids=str)
def test_a_quantized_weight_takes_the_bytes_that_are_said_and_each_value_is_a_code_times_its_scale(
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


def test_an_export_reads_files_of_the_decoder_alone(files: Path, tmp_path: Path) -> None:
    """Such files, as GPT-2 has on the hub, lack the prefix that the model has."""
    (path,) = files.glob("*.safetensors")
    weights = {name.removeprefix("model."): value for name, value in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    backend = adapted(files)
    train(backend, range(1))
    backend.save(tmp_path / "saved")
    run = run_config(files, model=ModelConfig(path=str(files)), backend=backend._config)
    read = dict(read_weights(run, tmp_path / "saved", {}).tensors)
    expected = dict(backend.named_weights())
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], value.float()) for name, value in expected.items())


def test_a_model_without_linear_layers_is_not_held_wide_in_silence() -> None:
    with pytest.raises(ModelError, match="base_dtype"):
        quantize_weights(tiny_model(family_of("gpt2")), torch.float32)


@pytest.mark.parametrize("trains", ["weights", "adapters"])
def test_weights_that_a_model_reads_in_its_own_way_are_refused_with_the_fix(tmp_path: Path, trains: str) -> None:
    is_adapted = trains == "adapters"
    run = {"model": ModelConfig(path=str(mamba(tmp_path, torch.bfloat16 if is_adapted else torch.float32)))}
    settings: dict[str, Any] = {"precision": "bf16", "weights": "bf16_masters"}
    if is_adapted:
        settings = {"lora": LoraConfig(target_modules=("in_proj",))}
    with pytest.raises(ModelError, match=r"base_dtype: fp32 or backend\.weights: fp32"):
        local_backend(tmp_path, run=run, probe=True, **settings)


class _ScaledEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.tensor(3.3, dtype=self.weight.dtype)


def test_a_weight_that_some_module_reads_in_its_own_way_stays_wide() -> None:
    model = nn.ModuleDict({"embed": _ScaledEmbedding(7, 4), "head": nn.Linear(4, 7, bias=False), "up": nn.Linear(4, 4)})
    assert [name for name, _ in narrowable_modules(model)] == ["head", "up"]
    model["head"].weight = model["embed"].weight
    assert [name for name, _ in narrowable_modules(model)] == ["up"]


def test_a_model_that_rounds_to_the_dtype_of_its_weights_is_not_rounded_in_silence() -> None:
    model: Any = nn.ModuleDict({"head": nn.Linear(4, 7)}).requires_grad_(False)
    narrow_weights(model, torch.bfloat16, torch.float32)
    assert model["head"](torch.ones(2, 4)).dtype == torch.float32
    with pytest.raises(ModelError, match="base_dtype: fp32"):
        model["head"](torch.ones(2, 4, dtype=torch.bfloat16))


def test_a_missing_library_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "find_spec", lambda name: None if name == "bitsandbytes" else object())
    with pytest.raises(ConfigError, match=r"bitsandbytes.*spurline-models\[qlora\]"):
        LocalBackendConfig(lora=LoraConfig(base_dtype="nf4")).check_model(run_config("m"))
