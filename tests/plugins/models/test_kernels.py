"""Fused kernels belong to one model, are compared with its own code, and are refused where they cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, run_config, write_model_folder
from every_run import SOAK
from fused_kernels import Fused
from transformers.models.qwen3 import modeling_qwen3

from spurline.errors import ConfigError, ModelError
from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_models import configs
from spurline_models.kernels import own_code
from spurline_models.local.configs import LocalBackendConfig

OBJECTIVE = cross_entropy(20.0)
SUPPORT = Path(__file__).parents[2] / "support" / "liger_on_cpu.py"
TYPES = ["qwen3", "llama", "qwen2", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "smollm3"]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> Fused:
    return Fused(monkeypatch)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def test_kernels_compute_one_model_and_no_other_of_its_class(fused: Fused, model: Path) -> None:
    batch = lay_out(make_samples([9, 12, 5]))
    file = dict(vars(modeling_qwen3))
    with_kernels = excite(local_backend(model, kernels="liger"))
    assert {name for name, value in vars(modeling_qwen3).items() if value is not file[name]} == set()
    plain = excite(local_backend(model))
    fused.calls.clear()
    expected = dict(plain.gradients(batch, OBJECTIVE))
    assert fused.calls == set()
    for name, gradient in with_kernels.gradients(batch, OBJECTIVE):
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert fused.calls == {"norm", "mlp", "rope"}
    assert with_kernels.facts()["kernels"] == "gated activations, norms, rotary positions"
    assert "kernels" not in plain.facts()


def test_a_model_computes_by_its_own_code_again_for_as_long_as_it_is_asked_to(fused: Fused, model: Path) -> None:
    backend = local_backend(model, kernels="liger")
    batch = lay_out(make_samples([9]))
    fused.calls.clear()
    with own_code(backend._model.causal):
        backend.logprobs(batch)
    assert fused.calls == set()
    backend.logprobs(batch)
    assert fused.calls == {"norm", "mlp", "rope"}


def test_the_probe_refuses_kernels_that_compute_something_else(fused: Fused, model: Path) -> None:
    excite(local_backend(model, kernels="liger", probe=True))
    fused.factor = 1.01
    with pytest.raises(ModelError, match=r"with fused kernels than by its own code: .* Set backend\.kernels: none"):
        local_backend(model, kernels="liger", probe=True)


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({"precision": "fp64"}, {}, "compute in fp32. Set precision: fp32 or bf16, or set kernels: auto"),
        ({}, {"model_type": "gpt_neox"}, "does not know the model type 'gpt_neox'. It knows qwen3. Set kernels: none"),
    ],
)
def test_kernels_that_are_asked_for_and_do_not_fit_are_refused(
    fused: Fused, tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], reason: str
) -> None:
    folder = write_model_folder(tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=f"backend.kernels is liger, but .*{reason}"):
        local_backend(folder, kernels="liger", **settings)
    # Nobody asked for them by name.
    assert "kernels" not in local_backend(write_model_folder(tmp_path / "other"), kernels="auto", **settings).facts()


@pytest.mark.parametrize("config", [LocalBackendConfig, FsdpBackendConfig])
def test_a_run_on_a_gpu_without_them_names_the_package(
    config: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def notes(**settings: Any) -> str:
        return " ".join(config(**settings).notes(run_config(model)))

    assert "pip install" not in notes(device="cuda")
    monkeypatch.setattr(configs, "find_spec", lambda name: None)
    assert "pip install 'spurline-models[liger]'" in notes(device="cuda")
    assert "pip install" not in notes(device="cpu") + notes(device="cuda", kernels="none")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not SOAK, reason="importing Liger takes a quarter of a minute; see `make soak`")
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="the extra liger is not installed")
def test_gradients_by_the_real_kernels_are_those_of_pytorch() -> None:
    done = subprocess.run([sys.executable, SUPPORT, *TYPES], capture_output=True, text=True, check=True, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name: kernels for name, (_, kernels) in found.items()} == dict.fromkeys(
        TYPES, "gated activations, norms, rotary positions"
    )
    assert {name: worst for name, (worst, _) in found.items() if worst > 1e-5} == {}
