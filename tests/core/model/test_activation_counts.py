"""What a plan counts of activations is what autograd keeps when the model really runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import lay_out, local_backend, make_samples, run_config, write_model_folder
from torch import Tensor
from transformers import AutoConfig

from spurline.backends.local.configs import LocalBackendConfig
from spurline.config.run_config import ModelConfig
from spurline.losses.configs import CrossEntropyConfig
from spurline.losses.cross_entropy import CrossEntropy
from spurline.model.configs import LoraConfig
from spurline.model.memory import NOT_AT_ONCE, model_shapes, token_activations
from spurline.protocols.loss import Objective

OBJECTIVE = Objective(CrossEntropy(CrossEntropyConfig()), 100.0)
LAYERS = 5


def kept_bytes(backend: Any, tokens: int) -> int:
    """Of one forward pass over a sequence, without the weights."""
    storages: dict[int, Tensor] = {}
    weights = {value.untyped_storage().data_ptr() for value in backend._model.causal.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        backend.update(lay_out(make_samples([tokens])), OBJECTIVE)
    return sum(value.untyped_storage().nbytes() for value in storages.values())


@pytest.mark.parametrize(
    ("settings", "freeze"),
    [
        ({}, ()),
        ({"precision": "bf16"}, ()),
        ({"lora": LoraConfig(rank=4)}, ()),
        ({}, ("*embed_tokens*", "re:layers\\.[0-2]\\.")),
    ],
    ids=["all", "bf16", "lora", "frozen"],
)
def test_activations_are_what_autograd_keeps(tmp_path: Path, settings: dict[str, Any], freeze: tuple[str, ...]) -> None:
    folder = write_model_folder(tmp_path, num_hidden_layers=LAYERS)
    model = ModelConfig(path=str(folder), init="random", freeze=freeze)
    backend = local_backend(folder, run={"model": model}, probe=False, **settings)
    grown = (kept_bytes(backend, 320) - kept_bytes(backend, 64)) / 256
    vocabulary = backend._model.causal.config.vocab_size
    said = token_activations(model, settings.get("lora"), settings.get("precision", "fp32")).kept(checkpointing=False)
    # Beside it the log-probabilities of the vocabulary, hidden states that are scored, and the targets.
    assert said + 4 * vocabulary == pytest.approx(grown, rel=0.05)


def test_shapes_that_depend_on_values_are_counted_by_rule_of_thumb(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=300, state_size=4)
    config.save_pretrained(tmp_path)
    assert token_activations(ModelConfig(path=str(tmp_path), init="random"), None, "fp32").kept(checkpointing=False) > 0


def test_a_model_whose_files_have_changed_is_looked_at_again(tmp_path: Path) -> None:
    model = ModelConfig(path=str(write_model_folder(tmp_path, num_hidden_layers=2)), init="random")
    of_two = model_shapes(model, None), token_activations(model, None, "fp32")
    write_model_folder(tmp_path, num_hidden_layers=4)
    assert model_shapes(model, None).layers == 2 * of_two[0].layers
    assert token_activations(model, None, "fp32").kept(checkpointing=False) > of_two[1].kept(checkpointing=False)


def test_gradients_add_up_with_activations_in_several_microbatches_alone(tmp_path: Path) -> None:
    run = run_config(write_model_folder(tmp_path))
    one = LocalBackendConfig().estimate_memory(run, 4000, 4000)
    several = LocalBackendConfig(max_tokens_per_microbatch=4000).estimate_memory(run, 4000, 8000)
    assert sum(several.values()) - sum(one.values()) == one["gradients"]
    assert one[NOT_AT_ONCE] < 0
    nothing = LocalBackendConfig().estimate_memory(run, 0, 0)
    assert sum(nothing.values()) == nothing["weights"] + nothing["gradients"] + nothing["optimizer"]
