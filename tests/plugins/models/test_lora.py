"""Adapters train alone, leave the backend merged, and are on every linear layer that can carry one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, run_config, write_model_folder
from expert_models import write_expert_model
from model_families import FAMILIES, tiny_model

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, ModelError
from spurline_models.adapters.lora import adapted_layers, add_adapters
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
    tiny_model(next(family for family in FAMILIES if family.model_type == model_type)).save_pretrained(folder)
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
