"""The tensors of a model become the weights of its files: each once, alone or with those they are converted with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import excite, local_backend, write_model_folder
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from spurline.config.run_config import ModelConfig
from spurline_models.adapters.lora import adapted_layers, add_adapters, initial_adapters
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.configs import LoraConfig
from spurline_models.weights import NamedWeights

MIXTURE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "decoder_sparse_step": 1,
}
ADAPTERS = LoraConfig(rank=4)


def built(folder: Path) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(load_model_config(ModelConfig(path=str(folder))), dtype=torch.float32)


def without_memory(folder: Path) -> PreTrainedModel:
    model = ModelConfig(path=str(folder))
    return build_without_memory(load_model_config(model), model)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, MIXTURE], ids=["plain", "tied", "experts"])
def test_groups_convert_to_what_the_whole_model_converts_to(tmp_path: Path, changes: dict[str, Any]) -> None:
    causal = built(write_model_folder(tmp_path, **changes))
    own: dict[str, Tensor] = dict(causal.named_parameters())
    named = NamedWeights(causal, adapted=False)
    weights = dict(named)
    assert equal(weights, revert_weight_conversion(causal, own))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in weights.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in named.layout.items()
    }
    assert sorted(source for group in named.groups for source in group.sources) == sorted(own)


def test_adapters_are_merged_from_tensors_that_the_model_does_not_hold(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    backend = excite(local_backend(folder, lora=ADAPTERS))
    gathered = {name: tensor.detach().clone() for name, tensor in backend._model.causal.state_dict().items()}
    causal = without_memory(folder)
    add_adapters(causal, ADAPTERS, seed=0)
    named = NamedWeights(causal, adapted=True)
    merged = {name: t for group in named.groups for name, t in named.weights_of(group, gathered).items()}
    assert equal(merged, dict(backend.named_weights()))
    assert all(tensor.is_meta for tensor in causal.state_dict().values())


def test_frozen_weights_of_two_bytes_are_merged_in_the_precision_of_their_adapters(tmp_path: Path) -> None:
    causal = built(write_model_folder(tmp_path)).bfloat16()
    add_adapters(causal, ADAPTERS, seed=0)
    dtypes = {parameter.requires_grad: parameter.dtype for parameter in causal.parameters()}
    assert dtypes == {False: torch.bfloat16, True: torch.float32}
    with torch.no_grad():
        for name, parameter in causal.named_parameters():
            if "lora_B" in name:
                parameter.fill_(1e-4)
    name = "model.layers.0.self_attn.q_proj"
    named = NamedWeights(causal, adapted=True)
    layer = dict(adapted_layers(causal))[name]
    expected = layer.get_base_layer().weight.float() + layer.get_delta_weight("default")  # type: ignore[union-attr,operator]
    assert torch.equal(dict(named)[f"{name}.weight"], expected)
    assert named.layout[f"{name}.weight"].dtype == torch.float32
    assert named.layout["model.norm.weight"].dtype == torch.bfloat16


def test_adapters_begin_with_values_that_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    real, other, fewer, empty = built(folder), built(folder), built(folder), without_memory(folder)
    add_adapters(real, ADAPTERS, seed=3)
    add_adapters(other, ADAPTERS, seed=4)
    torch.manual_seed(99)
    add_adapters(fewer, LoraConfig(rank=4, target_modules=("v_proj",)), seed=3)
    add_adapters(empty, ADAPTERS, seed=3)
    drawn = dict(initial_adapters(empty, seed=3))
    trained = {name: value.detach() for name, value in real.named_parameters() if value.requires_grad}
    assert equal(drawn, trained)
    for name, value in fewer.named_parameters():
        assert not value.requires_grad or torch.equal(value, trained[name])
    first = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(other.get_parameter(first), trained[first])
    assert not torch.equal(trained[first], trained[first.replace("layers.0", "layers.1")])
    assert all(value.is_meta for value in empty.parameters())


def test_adapters_begin_as_peft_begins_them(tmp_path: Path) -> None:
    causal = built(write_model_folder(tmp_path, hidden_size=256))
    before = {name: tensor.clone() for name, tensor in NamedWeights(causal, adapted=False)}
    add_adapters(causal, LoraConfig(rank=64), seed=0)
    assert equal(dict(NamedWeights(causal, adapted=True)), before)
    value = causal.get_parameter("model.layers.0.self_attn.q_proj.lora_A.default.weight").detach()
    # Uniform between +-1/sqrt(inputs), as a linear layer begins.
    assert 0.99 / 16 < value.abs().max() <= 1 / 16
    assert value.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.02)
    assert abs(value.mean().item()) < 1e-3
