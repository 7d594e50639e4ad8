"""Adapters train alone, are on each linear layer that can carry one, and leave merged or as PEFT saves them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, run_config, write_model_folder
from expert_models import write_expert_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_families import family_of, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, ModelError
from spurline_models.adapters.adapter_weights import AdapterStream, AdapterWeights, write_adapter_files
from spurline_models.adapters.lora import adapted_layers, adapter_settings, add_adapters
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.testing.inputs import write_tiny_moe_model
from spurline_models.trainable import check_trainable

OBJECTIVE = cross_entropy(9.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def test_only_adapters_change(model: Path) -> None:
    backend = local_backend(model, lora=LoraConfig(rank=4), probe=True)
    causal = backend._model.causal
    before = {name: parameter.clone() for name, parameter in causal.named_parameters()}
    backend.update(lay_out(make_samples([9, 12])), OBJECTIVE)
    backend.update(lay_out(make_samples([9, 12])), OBJECTIVE)
    changed = {name for name, parameter in causal.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert {name for name, _ in backend.gradients(lay_out(make_samples([9])), OBJECTIVE)} == changed


def test_autocast_alone_converts_the_inputs_of_adapters(model: Path) -> None:
    class Conversions(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten._to_copy.default
            return func(*args, **(kwargs or {}))

    def gradients(by_peft: bool) -> tuple[int, dict[str, torch.Tensor]]:
        backend = excite(local_backend(model, precision="bf16", lora=LoraConfig(rank=4)))
        for _, layer in adapted_layers(backend._model.causal):
            layer.cast_input_dtype_enabled = layer.cast_input_dtype_enabled or by_peft  # type: ignore[attr-defined]
        with Conversions() as seen:
            found = dict(backend.gradients(lay_out(make_samples([9, 12])), OBJECTIVE))
        return seen.count, found

    (count, got), (by_peft, expected) = gradients(False), gradients(True)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    # Of 2 layers, the inputs of o_proj and down_proj, to fp32 and back, in the forward and backward pass.
    assert by_peft - count == 2 * 2 * 2 * 2


def test_adapters_of_a_model_without_memory_have_no_values_and_draw_none(model: Path) -> None:
    settings = ModelConfig(path=str(model))
    causal = build_without_memory(load_model_config(settings), settings)
    before = torch.get_rng_state()
    add_adapters(causal, LoraConfig(rank=4), seed=0)
    assert {parameter.device.type for parameter in causal.parameters()} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)


def test_merged_weights_equal_pefts_own_merge_and_training_goes_on_unmerged(model: Path) -> None:
    backend = excite(local_backend(model, lora=LoraConfig(rank=4, alpha=3.0)))
    merged = {name: tensor.clone() for name, tensor in backend.named_weights()}
    plain = local_backend(model)
    assert {name: tensor.shape for name, tensor in merged.items()} == {
        name: tensor.shape for name, tensor in plain.named_weights()
    }
    by_peft = copy.deepcopy(backend._model.causal)
    layers = list(adapted_layers(by_peft))
    assert len(layers) == 14
    for name, layer in layers:
        layer.merge()
        torch.testing.assert_close(merged[f"{name}.weight"], layer.get_base_layer().weight.detach())
    assert not any(layer.merged for _, layer in adapted_layers(backend._model.causal))
    # A full model with the merged weights computes what the adapted one computes.
    batch = lay_out(make_samples([9, 12]))
    plain._model.causal.load_state_dict(merged)
    torch.testing.assert_close(plain.logprobs(batch), backend.logprobs(batch), rtol=1e-5, atol=1e-5)


def test_adapters_on_experts_are_merged_as_peft_merges_them(tmp_path: Path) -> None:
    folder = write_tiny_moe_model(tmp_path / "experts")
    backend = excite(
        local_backend(folder, lora=LoraConfig(rank=4, alpha=3.0), run={"model": ModelConfig(path=str(folder))})
    )
    merged = {name: tensor.clone() for name, tensor in backend.named_weights()}
    by_peft = copy.deepcopy(backend._model.causal)
    layers = [layer for _, layer in adapted_layers(by_peft)]
    assert {layer.parameter_name for layer in layers if hasattr(layer, "parameter_name")} >= {
        "gate_up_proj",
        "down_proj",
    }
    for layer in layers:
        layer.merge()
    experts = by_peft.get_submodule("model.layers.1.mlp.experts").get_base_layer()  # type: ignore[operator]
    for number in range(8):
        name = f"model.layers.1.mlp.experts.{number}"
        gate, up = experts.gate_up_proj[number].detach().chunk(2)
        torch.testing.assert_close(merged[f"{name}.gate_proj.weight"], gate)
        torch.testing.assert_close(merged[f"{name}.up_proj.weight"], up)
        torch.testing.assert_close(merged[f"{name}.down_proj.weight"], experts.down_proj[number].detach())
    router = by_peft.get_submodule("model.layers.0.mlp.gate").get_base_layer()  # type: ignore[operator]
    torch.testing.assert_close(merged["model.layers.0.mlp.gate.weight"], router.weight.detach())


def test_an_adapter_on_the_output_layer_is_used_and_merged(model: Path) -> None:
    backend = excite(local_backend(model, lora=LoraConfig(rank=4, target_modules=("lm_head", "q_proj")), probe=True))
    plain = local_backend(model)
    plain._model.causal.load_state_dict(dict(backend.named_weights()))
    batch = lay_out(make_samples([9, 12]))
    torch.testing.assert_close(plain.logprobs(batch), backend.logprobs(batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 4.0)])
def test_rslora_divides_by_the_root_of_the_rank(model: Path, rslora: bool, scale: float) -> None:
    backend = local_backend(model, lora=LoraConfig(rank=4, alpha=8.0, rslora=rslora))
    assert {layer.scaling["default"] for _, layer in adapted_layers(backend._model.causal)} == {scale}
    settings = backend.adapter_settings()
    assert settings is not None
    assert settings["use_rslora"] is rslora


def test_an_adapter_on_a_tied_output_layer_is_refused(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "tied", tie_word_embeddings=True)
    with pytest.raises(ModelError, match="share one weight"):
        local_backend(folder, lora=LoraConfig(target_modules=("lm_head",)))


LEFT_OUT = {
    "llama4_text": ["router"],
    "falcon_h1": ["out_proj"],
    "mamba": ["dt_proj", "out_proj", "x_proj"],
    "bamba": ["out_proj"],
}


def model_of(model_type: str, folder: Path) -> dict[str, Any]:
    """Sections of a run with a tiny model of this family."""
    tiny_model(family_of(model_type)).save_pretrained(folder)
    return {"model": ModelConfig(path=str(folder))}


@pytest.mark.parametrize(("model_type", "left_out"), LEFT_OUT.items())
def test_what_cannot_carry_an_adapter_is_left_out_and_named(
    model_type: str, left_out: list[str], tmp_path: Path
) -> None:
    run = model_of(model_type, tmp_path)
    lora = LoraConfig(rank=2)
    backend = local_backend(tmp_path, lora=lora, run=run, probe=True)
    adapted = {name.rpartition(".")[2] for name, _ in adapted_layers(backend._model.causal)}
    assert adapted
    assert adapted.isdisjoint(left_out)
    batch = lay_out(make_samples([9, 12]))
    # At first only the second of an adapter's matrices has a gradient.
    for name, gradient in backend.gradients(batch, OBJECTIVE):
        assert torch.isfinite(gradient).all()
        assert "lora_B" not in name or gradient.any(), name
    merged = dict(backend.named_weights())
    assert merged.keys() == {name for name, _ in local_backend(tmp_path, run=run).named_weights()}
    config = LocalBackendConfig(lora=lora)
    _, note = config.notes(run_config(tmp_path, **run))
    assert f"all-linear leaves out {', '.join(left_out)} (" in note
    parts = config.estimate_memory(run_config(tmp_path, **run), 100, 100).parts
    assert parts["gradients"] == sum(value.nbytes for value in backend._policy.parameters.values())


@pytest.mark.parametrize("model_type", ["llama4_text", "mamba"])
def test_a_module_that_cannot_carry_an_adapter_is_refused_by_name(model_type: str, tmp_path: Path) -> None:
    run, name = model_of(model_type, tmp_path), LEFT_OUT[model_type][0]
    with pytest.raises(
        ModelError, match=rf"target_modules names .*{name}, which cannot carry an adapter: .*all-linear"
    ):
        local_backend(tmp_path, lora=LoraConfig(target_modules=(name,)), run=run)


def test_notes_count_the_adapted_modules_by_name(tmp_path: Path) -> None:
    config = LocalBackendConfig(lora=LoraConfig(target_modules=("q_proj", "v_proj"), rank=8))
    (note,) = config.notes(run_config(tmp_path, **model_of("llama", tmp_path)))
    assert note.startswith("LoRA rank 8 on 2 x q_proj, 2 x v_proj: 1.79k trained ")


def test_notes_name_the_tensors_of_stored_experts(tmp_path: Path) -> None:
    """A name that PEFT turns into that of a stored tensor counts as one that matches."""
    write_expert_model(tmp_path)
    config = LocalBackendConfig(lora=LoraConfig(target_modules=("q_proj", "down_proj")))
    (note,) = config.notes(run_config(tmp_path))
    assert "2 x q_proj" in note
    assert "2 x down_proj" in note


@pytest.mark.parametrize("targets", [("q_proj", "vproj"), ("vproj", "q_proj"), ("vproj",)])
def test_every_target_must_name_a_module(tmp_path: Path, targets: tuple[str, ...]) -> None:
    run = run_config(tmp_path, **model_of("llama", tmp_path))
    with pytest.raises(
        ConfigError, match=rf"target_modules\.{targets.index('vproj')} is 'vproj'.*Did you mean 'v_proj'"
    ):
        LocalBackendConfig(lora=LoraConfig(target_modules=targets)).notes(run)
    run = run.model_copy(update={"backend": LocalBackendConfig(lora=LoraConfig(target_modules=targets))})
    with pytest.raises(ConfigError, match="is 'vproj'"):
        check_trainable(run)


TARGETS: dict[str, tuple[str, ...] | str] = {
    "all linear layers": "all-linear",
    "some": ("q_proj", "down_proj"),
    "the output layer": ("lm_head", "v_proj"),
    "the embedding": ("embed_tokens", "v_proj"),
}


def by_peft(causal: Any) -> dict[str, torch.Tensor]:
    """What PEFT itself saves of the adapter, by its names in files; it names a model within a `PeftModel`."""
    found = peft.get_peft_model_state_dict(causal, save_embedding_layers=False)
    return {f"base_model.model.{name}": tensor for name, tensor in found.items()}


@pytest.mark.parametrize("targets", TARGETS.values(), ids=TARGETS.keys())
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "checkpointed"])
def test_names_and_values_are_those_that_peft_saves(
    tmp_path: Path, targets: tuple[str, ...] | str, wrapped: bool
) -> None:
    folder = write_model_folder(tmp_path / "model")
    lora = LoraConfig(rank=4, alpha=3.0, target_modules=targets)  # type: ignore[arg-type]
    backend = excite(local_backend(folder, lora=lora, activation_checkpointing=wrapped))
    expected = by_peft(backend._model.causal)
    got = dict(backend.named_adapter_weights())
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert all(bool((tensor != 0).any()) for tensor in got.values())
    layout = AdapterWeights(backend._model.causal).layout
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in layout.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()
    }


def test_a_module_that_is_called_as_the_adapter_keeps_its_name() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.default = torch.nn.Linear(4, 4)

    outer = torch.nn.Module()
    outer.inner = Layer()
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["default"]), outer)
    names = set(AdapterWeights(outer).layout)  # type: ignore[arg-type]
    assert names == {f"base_model.model.inner.default.lora_{part}.weight" for part in "AB"}


@given(
    rank=st.integers(1, 6),
    alpha=st.floats(0.25, 64.0).map(lambda value: round(value, 2)),
    targets=st.sampled_from(["all-linear", ("q_proj",), ("k_proj", "up_proj", "o_proj")]),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_peft_loads_what_is_written_and_computes_what_the_adapted_model_computes(
    tmp_path_factory: pytest.TempPathFactory, spurline_tiny_model: Path, rank: int, alpha: float, targets: Any
) -> None:
    _assert_loads(
        tmp_path_factory.mktemp("adapter"),
        spurline_tiny_model,
        LoraConfig(rank=rank, alpha=alpha, target_modules=targets),
    )


def test_adapters_on_experts_are_loaded_by_peft(tmp_path: Path) -> None:
    # Their matrices have another rank and scale than those of other layers, and some lie in each other.
    settings = _assert_loads(tmp_path, write_tiny_moe_model(tmp_path / "experts"), LoraConfig(rank=4, alpha=3.0))
    assert settings["target_parameters"]
    assert settings["rank_pattern"]


def _assert_loads(folder: Path, model: Path, lora: LoraConfig) -> dict[str, Any]:
    """PEFT loads the settings and tensors of an adapter with random values; returns the settings."""
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    add_adapters(causal, lora, seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in AdapterWeights(causal).tensors.values():
            parameter.copy_(torch.empty(parameter.shape).normal_(std=0.3, generator=generator))
    settings = adapter_settings(causal, ModelConfig(path=str(model)))
    write_adapter_files(folder, AdapterStream(settings, iter(AdapterWeights(causal))))
    assert json.loads((folder / "adapter_config.json").read_text()) == settings
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, folder).eval()
    tokens = torch.arange(12)[None] % causal.config.vocab_size
    with torch.no_grad():
        wanted = causal.eval()(tokens).logits
        assert torch.equal(loaded(tokens).logits, wanted)
        # The adapter is on, and changes what is computed.
        loaded.disable_adapter_layers()
        assert not torch.equal(loaded(tokens).logits, wanted)
    return settings


def test_settings_name_what_peft_would_have_saved_itself(tmp_path: Path, spurline_tiny_model: Path) -> None:
    causal = AutoModelForCausalLM.from_pretrained(spurline_tiny_model)
    add_adapters(causal, LoraConfig(rank=4, alpha=8.0, dropout=0.1), seed=0)
    causal.peft_config["default"].save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    got = adapter_settings(causal, ModelConfig(path="some/model", revision="abc"))
    assert sorted(got.pop("target_modules")) == sorted(saved.pop("target_modules"))
    own = {"base_model_name_or_path": "some/model", "revision": "abc", "inference_mode": True}
    assert got == {**saved, **own}
    assert (got["peft_type"], got["task_type"], got["r"], got["lora_alpha"]) == ("LORA", "CAUSAL_LM", 4, 8)
    assert isinstance(got["lora_alpha"], int)
