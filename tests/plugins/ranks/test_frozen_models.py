"""Models that are not trained (`model.frozen`) score with their own weights and architecture on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsdp_layouts
import megatron_layouts
import pytest
import torch
from megatron_layouts import write_llama3, write_qwen3
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spurline.data.batch import TrainingBatch, segment_numbers
from spurline.errors import ModelError
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import backend_run, opened

PLUGINS = ("fsdp_backend", "megatron_backend")
soak = pytest.mark.slow
LOCAL = {"name": "models/local", "device": "cpu", "precision": "fp32"}
ON_RANKS = [
    pytest.param(settings, marks=(pytest.mark.processes, *marks))
    for settings, marks in (
        (fsdp_layouts.on(2), ()),
        (megatron_layouts.on(2, tensor=2, frozen="host"), ()),
        (fsdp_layouts.on(3, lora={"rank": 2}), (soak,)),
        (megatron_layouts.on(2, pipeline=2), (soak,)),
    )
]


def expected_logprobs(folder: Path, batch: TrainingBatch, temperature: float) -> Tensor:
    """The logprobs of a plain forward pass of transformers for each sequence."""
    causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    result = torch.zeros(batch.num_rows, batch.length)
    for number in segment_numbers(batch).unique().tolist():
        at = (segment_numbers(batch) == number) & (batch.tokens["segment_ids"] > 0)
        if not at.any():
            continue
        tokens = batch.tokens["input_ids"][at].long()
        with torch.no_grad():
            scores = (causal(input_ids=tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        found = scores.gather(-1, tokens[1:, None])[:, 0]
        result[at] = torch.cat([torch.zeros(1), found]) * (batch.tokens["loss_weights"][at] != 0)
    return batch.drop_padding_rows(result)


@pytest.mark.parametrize("settings", [LOCAL, {**LOCAL, "lora": {"rank": 2}}, *ON_RANKS], ids=str)
def test_a_frozen_model_of_another_architecture_gives_the_logprobs_of_transformers(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    policy = write_qwen3(tmp_path / "policy")
    frozen = {
        "teacher": {"path": str(write_llama3(tmp_path / "teacher", hidden_size=48, num_hidden_layers=3))},
        "reference": {"path": str(write_qwen3(tmp_path / "older")), "config_overrides": {"rms_norm_eps": 0.1}},
    }
    with opened(backend_run(policy, settings, PLUGINS, frozen=frozen)) as (backend, layout):
        batch, objective = minibatch("packed", layout)
        teacher = expected_logprobs(tmp_path / "teacher", batch, 0.7)
        own = expected_logprobs(policy, batch, 1.0)
        torch.testing.assert_close(backend.logprobs(batch, "teacher", temperature=0.7), teacher, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(backend.logprobs(batch), own, rtol=1e-5, atol=1e-5)
        reference = backend.logprobs(batch, "reference")
        assert (reference - own).abs().max() > 1e-3
        backend.update(batch, objective)
        assert torch.equal(backend.logprobs(batch, "reference"), reference)
        with pytest.raises(ModelError, match=r"has no model with the role 'teachr'. Did you mean 'teacher'"):
            backend.logprobs(batch, "teachr")
        (tmp_path / "saved").mkdir()
        backend.save(tmp_path / "saved")
    # A resumed run refuses a model whose weights have changed, and no other.
    weights = load_file(tmp_path / "teacher" / "model.safetensors")
    name = next(iter(weights))
    save_file({**weights, name: weights[name] + 1}, tmp_path / "teacher" / "model.safetensors", {"format": "pt"})
    with opened(backend_run(policy, settings, PLUGINS, frozen=frozen)) as (backend, _):
        backend.load(tmp_path / "saved")
        assert torch.equal(backend.logprobs(batch, "reference"), reference)
        with pytest.raises(Exception, match=r"model.frozen.teacher.path: the teacher model needs the weights that was"):
            backend.logprobs(batch, "teacher")
