"""A loss that reads logits gets those of the models that it asks for, in every backend and with any of its settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from backend_batches import lay_out, local_backend, make_samples

from spurline.config.run_config import ModelConfig
from spurline.protocols.loss import Objective
from spurline_distillation.configs import DistillationConfig
from spurline_distillation.loss import Distillation
from spurline_models.testing.inputs import write_tiny_model

BATCH = lay_out(make_samples([9, 12, 20, 3], loss_share=1.1))
DISTILLATION = Objective(Distillation(DistillationConfig()), 9.0)


def test_a_teacher_is_probed_and_read_at_its_first_use_in_half_precision(tmp_path: Path) -> None:
    """Autocast would round both sides of the probe, whose tolerance is that of fp32."""
    policy, teacher = write_tiny_model(tmp_path / "policy"), write_tiny_model(tmp_path / "teacher", hidden_size=48)
    model = ModelConfig.model_validate({"path": str(policy), "frozen": {"teacher": {"path": str(teacher)}}})
    exact, half = (
        local_backend(policy, run={"model": model}, precision=precision, probe=True) for precision in ("fp32", "bf16")
    )
    wanted = exact.evaluate(BATCH, DISTILLATION).loss
    assert half.update(BATCH, DISTILLATION)["loss"] * 9.0 == pytest.approx(wanted, rel=0.05)
