"""What a plan counts of activations by a rule of thumb is near what autograd keeps when the model really runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, run_config, write_model_folder
from expert_models import write_expert_model
from torch import Tensor

from spurline.config.run_config import ModelConfig
from spurline_models.architecture import decoder_layers
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_planning.fit import Load, memory_lines

OBJECTIVE = cross_entropy(100.0)
WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 8, "head_dim": 16}


def kept_bytes(backend: Any, tokens: int) -> int:
    """Bytes that one forward pass over a sequence keeps, without the weights."""
    storages: dict[int, Tensor] = {}
    weights = {value.untyped_storage().data_ptr() for value in backend._model.causal.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backend.update(lay_out(make_samples([tokens])), OBJECTIVE)
    return sum(value.untyped_storage().nbytes() for value in storages.values())


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"lora": LoraConfig(rank=4)}], ids=str)
@pytest.mark.parametrize("experts", [False, True])
def test_activations_are_about_what_autograd_keeps(tmp_path: Path, experts: bool, settings: dict[str, Any]) -> None:
    if experts:
        write_expert_model(tmp_path)
    else:
        write_model_folder(tmp_path, num_hidden_layers=5, **WIDE)
    model = ModelConfig(path=str(tmp_path), init="random")
    backend = local_backend(tmp_path, run={"model": model}, probe=False, **settings)
    # Beside it the log-probabilities of the vocabulary.
    grown = (kept_bytes(backend, 320) - kept_bytes(backend, 64)) / 256 - 4 * backend._model.causal.config.vocab_size
    estimate = LocalBackendConfig(**settings).estimate_memory(run_config(tmp_path, model=model), 1000, 1000)
    assert estimate.parts["activations"] / 1000 == pytest.approx(grown, rel=0.35)


def test_a_share_of_the_layers_is_recomputed_and_not_a_bit_of_the_gradients_changes(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, num_hidden_layers=4)
    run, batch = run_config(folder), lay_out(make_samples([9, 12]))
    plain = dict(local_backend(folder).gradients(batch, OBJECTIVE))
    activations = []
    for share, recomputed in ((False, 0), (0.3, 2), (0.5, 2), (0.9, 4), (True, 4)):
        backend = local_backend(folder, activation_checkpointing=share)
        calls = [0] * 4
        for number, layer in enumerate(decoder_layers(backend._model.causal)):

            def count(*_: Any, number: int = number, calls: list[int] = calls) -> None:
                calls[number] += 1

            layer.mlp.register_forward_pre_hook(count)  # type: ignore[union-attr, operator]
        for name, gradient in backend.gradients(batch, OBJECTIVE):
            assert torch.equal(gradient, plain[name]), name
        assert calls == [2] * recomputed + [1] * (4 - recomputed), "the lowest layers"
        activations.append(backend._config.estimate_memory(run, 100, 100).parts["activations"])
        savings = list(backend._config.savings(run, 100, 100))
        assert ({"activation_checkpointing": True} in savings) == (share is not True)
    whole, part, same, last, least = activations
    assert whole > part == same > last == least


def test_gradients_add_up_with_activations_in_several_microbatches_alone(tmp_path: Path) -> None:
    run = run_config(write_model_folder(tmp_path))
    one = LocalBackendConfig().estimate_memory(run, 4000, 4000)
    several = LocalBackendConfig(max_tokens_per_microbatch=4000).estimate_memory(run, 4000, 8000)
    assert several.peak - one.peak == one.parts["gradients"]
    nothing = LocalBackendConfig().estimate_memory(run, 0, 0)
    assert nothing.peak == sum(nothing.parts[name] for name in ("weights", "gradients", "optimizer"))
    lines = memory_lines(run, Load(4000, 4000), 80 << 30)
    assert "not all parts are in memory at once" in lines[-2]
