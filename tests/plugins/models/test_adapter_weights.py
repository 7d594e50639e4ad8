"""An adapter leaves the model under the names, with the values and with the settings that PEFT writes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from backend_batches import excite, local_backend, write_model_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from spurline.config.run_config import ModelConfig
from spurline_models.adapters.adapter_weights import AdapterStream, AdapterWeights, write_adapter_files
from spurline_models.adapters.lora import adapter_settings, add_adapters
from spurline_models.configs import LoraConfig
from spurline_models.testing.inputs import write_tiny_moe_model

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
