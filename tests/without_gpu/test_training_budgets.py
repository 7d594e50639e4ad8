"""A training step on a GPU launches few kernels, moves few bytes, and does not wait for the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from counted_kernels import Counts, ceiling, count_step
from model_families import family_of, tiny_model
from torch._subclasses.fake_tensor import DataDependentOutputException

from spurline.protocols.loss import Objective
from spurline_rl.losses.algorithms import Ppo
from spurline_rl.losses.configs import PpoConfig

LENGTHS = [5, 8, 13]


def counts_of(model_type: str, folder: Path, **settings: Any) -> Counts:
    family = family_of(model_type)
    tiny_model(family).config.save_pretrained(folder)
    objective = Objective(Ppo(PpoConfig(entropy_coefficient=0.1)), 9.0, temperature=0.7)
    return count_step(folder, LENGTHS, objective, family.reading, **settings)


@pytest.mark.parametrize(
    ("model_type", "weights"),
    [
        ("qwen3", "fp32"),
        ("qwen3", "bf16_masters"),
        ("llama", "bf16_masters"),
        ("mistral", "fp32"),
        ("gemma3_text", "fp32"),
        # Reads a row for each sequence.
        ("gemma2", "bf16_masters"),
    ],
)
def test_no_family_waits_for_the_device_in_a_micro_batch_or_a_step(
    model_type: str, weights: str, tmp_path: Path
) -> None:
    assert counts_of(model_type, tmp_path, weights=weights).kernels["_overwrite"] == 1


def test_a_step_of_pytorch_alone_does_not_wait_for_the_device(tmp_path: Path) -> None:
    counts = counts_of("qwen3", tmp_path, kernels="none", logits_chunk_tokens=8)
    assert counts.kernels["_overwrite"] == 0
    # All but the last of three chunks are computed twice.
    assert counts.kernels["_log_softmax[float32]"] == 5


def test_a_wait_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spurline_models.local.trained_model import TrainedModel

    norm = TrainedModel.gradient_norm
    monkeypatch.setattr(TrainedModel, "gradient_norm", lambda trained: torch.tensor(norm(trained).item()))
    with pytest.raises(DataDependentOutputException):
        counts_of("qwen3", tmp_path)


@pytest.mark.parametrize(
    ("model", "settings", "kernels", "gigabytes", "mfu"),
    [
        ("0.6B", {}, 2150, 530, 0.365),
        ("4B", {}, 2750, 1600, 0.465),
        ("8B", {}, 2750, 2300, 0.51),
        ("8B", {"weights": "bf16_masters"}, 3800, 2360, 0.505),
    ],
)
def test_a_step_of_32_768_tokens_keeps_to_its_budget(
    model: str, settings: dict[str, Any], kernels: float, gigabytes: float, mfu: float, tmp_path: Path
) -> None:
    found = ceiling(tmp_path, model, [4096] * 8, **settings)
    assert found.kernels <= kernels
    assert found.bytes <= gigabytes * 1e9
    assert found.mfu >= mfu
