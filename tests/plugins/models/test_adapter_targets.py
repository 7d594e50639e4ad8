"""`all-linear` means every linear layer that can carry an adapter, and says which cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, run_config
from expert_models import write_expert_model
from model_families import FAMILIES, tiny_model

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, ModelError
from spurline_models.adapters.lora import adapted_layers
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.trainable import check_trainable

OBJECTIVE = cross_entropy(9.0)
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
    assert note.startswith("LoRA rank 8 on 2 x q_proj, 2 x v_proj: 2 K trained ")


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
