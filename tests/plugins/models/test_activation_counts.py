"""What a plan counts of activations is what autograd keeps when the model really runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from backend_batches import lay_out, local_backend, make_samples, run_config, write_model_folder
from expert_models import write_expert_model
from torch import Tensor
from transformers import AutoConfig

from spurline.config.run_config import ModelConfig
from spurline.protocols.loss import Objective
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_models.memory import NOT_AT_ONCE, model_shapes, token_activations
from spurline_planning.fit import Load, memory_lines

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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stored_experts_are_counted_in_any_dtype_and_in_silence(
    tmp_path: Path, precision: Literal["fp32", "bf16"], capfd: pytest.CaptureFixture[str]
) -> None:
    model = ModelConfig(path=str(write_expert_model(tmp_path)), init="random")
    said = token_activations(model, None, precision).kept(checkpointing=False)
    backend = local_backend(tmp_path, run={"model": model}, probe=False, precision=precision)
    vocabulary = backend._model.causal.config.vocab_size
    grown = (kept_bytes(backend, 320) - kept_bytes(backend, 64)) / 256
    assert said + 4 * vocabulary == pytest.approx(grown, rel=0.05)
    assert "Traceback" not in capfd.readouterr().err


def test_a_plan_prints_no_negative_part(tmp_path: Path) -> None:
    run = run_config(write_model_folder(tmp_path, num_hidden_layers=2, vocab_size=20_000, hidden_size=256))
    config = LocalBackendConfig()
    assert config.estimate_memory(run, 4096, 4096)[NOT_AT_ONCE] < -(2**20)
    *_, total, _ = lines = memory_lines(run.model_copy(update={"backend": config}), Load(4096, 4096), 80 << 30)
    assert not any("-" in line for line in lines)
    assert "less than the sum" in total


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
