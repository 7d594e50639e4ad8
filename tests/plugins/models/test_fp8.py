"""Linear layers in fp8: what they leave alone, and that gradients do not depend on how a batch is cut."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, run_config, write_model_folder

from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_models.configs import LoraConfig
from spurline_models.local.backend import LocalBackend
from spurline_models.local.configs import LocalBackendConfig

OBJECTIVE = cross_entropy(40.0)
SAMPLES = make_samples([33, 7, 64, 120, 1, 18, 18, 5])
ROWS = [[3], [2, 0], [1, 5, 6, 4, 7]]

needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra fp8 is not installed")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model", intermediate_size=64, head_dim=16)


def worst_difference(one: LocalBackend, other: LocalBackend, rows: Any = None) -> float:
    expected = dict(one.gradients(lay_out(SAMPLES), OBJECTIVE))
    return max(
        float((gradient - expected[name]).norm() / expected[name].norm())
        for name, gradient in other.gradients(lay_out(SAMPLES, rows), OBJECTIVE)
    )


@needs_torchao
def test_gradients_are_near_and_do_not_depend_on_the_cut_of_the_batch(model: Path) -> None:
    exact, fp8 = excite(local_backend(model)), excite(local_backend(model, fp8="emulated", probe=True))
    cut = excite(local_backend(model, fp8="emulated", rows_per_microbatch=1, logits_chunk_tokens=50))
    # A matrix of 32 inputs rounds coarsely; that it does round is what the lower bound says.
    assert 0.01 < worst_difference(exact, fp8) < 0.4
    assert worst_difference(fp8, cut, ROWS) <= 1e-5


@needs_torchao
def test_the_decoders_linear_layers_alone_compute_in_fp8_and_weights_keep_their_names(model: Path) -> None:
    plain, fp8 = local_backend(model), local_backend(model, fp8="emulated")
    changed = {name for name, module in fp8._model.causal.named_modules() if type(module) is not torch.nn.Linear}
    linear = {name for name, module in plain._model.causal.named_modules() if isinstance(module, torch.nn.Linear)}
    assert linear & changed == linear - {"lm_head"}
    for (name, weight), (other, same) in zip(plain.named_weights(), fp8.named_weights(), strict=True):
        assert name == other
        assert torch.equal(weight, same)


@needs_torchao
def test_sizes_that_kernels_do_not_take_stay_as_they_are(tmp_path: Path) -> None:
    model = write_model_folder(tmp_path / "model", intermediate_size=40)
    kinds = {
        name.rsplit(".", 1)[-1]: type(module).__name__
        for name, module in local_backend(model, fp8="emulated")._model.causal.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    assert {name for name, kind in kinds.items() if kind == "Linear"} == {
        "gate_proj",
        "up_proj",
        "down_proj",
        "lm_head",
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"device": "cpu", "fp8": True, "precision": "bf16"}, "needs a GPU of Hopper's generation or newer"),
        ({"device": "cuda", "fp8": True, "precision": "fp32"}, "needs precision: bf16"),
        ({"device": "cpu", "fp8": "emulated", "lora": LoraConfig()}, "together with lora is not supported"),
    ],
)
def test_fp8_that_cannot_be_computed_is_refused(model: Path, settings: dict[str, Any], reason: str) -> None:
    for config in (LocalBackendConfig, FsdpBackendConfig):
        extra: dict[str, Any] = {"ranks": 2} if config is FsdpBackendConfig else {}
        run = run_config(model)
        assert [problem.key for problem in config(**settings, **extra).problems(run) if reason in problem.message] == [
            "fp8"
        ]
    [problem] = LocalBackendConfig(device="cpu", precision="fp64", fp8="emulated").problems(run_config(model))
    assert "emulated, which needs precision: fp32 or bf16" in problem.message
