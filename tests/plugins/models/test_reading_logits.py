"""A loss that reads logits gets those of the models that it asks for, in every backend and with any of its settings."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import excite, lay_out, local_backend, make_samples, run_config, write_model_folder
from expert_models import EXPERTS, LAYERS, TOP_K, random_experts, replaying_source, with_experts
from torch import Tensor

from spurline import load_config
from spurline.config.run_config import CriticConfig, ModelConfig
from spurline.data.configs import WholeBatchConfig
from spurline.errors import ConfigError, ModelError
from spurline.plugins.host import PluginHost
from spurline.protocols.loss import Objective
from spurline_distillation.configs import DistillationConfig
from spurline_distillation.loss import Distillation
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.losses.distributions import Distribution
from spurline_models.optimizers.configs import AdamWConfig
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_models.trainable import check_reading, check_trainable
from spurline_reward_models.configs import BradleyTerryConfig

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


def test_a_role_that_the_run_lacks_is_not_the_policy_in_disguise(tmp_path: Path) -> None:
    backend = excite(local_backend(write_model_folder(tmp_path)))
    with pytest.raises(ModelError, match=r"no model with the role 'teacher'"):
        backend.evaluate(BATCH, DISTILLATION)


class _ForgetfulConfig(DistillationConfig):
    """A loss whose config does not name the role that it reads."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset()


REFERENCE = DistillationConfig(teacher="reference")
ON_HEAD = LocalBackendConfig(lora=LoraConfig(target_modules=("q_proj", "lm_head")))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        (
            {"critic": CriticConfig(loss=REFERENCE, minibatches=WholeBatchConfig(), optimizer=AdamWConfig())},
            r"critic\.loss reads logits, and a critic has a value head",
        ),
        (
            {"loss": _ForgetfulConfig()},
            r"loss reads the logits of teacher, which _ForgetfulConfig\.roles does not name",
        ),
        ({"loss": REFERENCE, "backend": ON_HEAD}, r"target_modules names the output layer lm_head"),
        ({"loss": REFERENCE, "backend": LocalBackendConfig(lora=LoraConfig())}, None),
        ({"backend": ON_HEAD}, None),
    ],
)
def test_logits_that_no_model_has_are_refused_before_weights_are_loaded(
    tmp_path: Path, sections: dict[str, Any], said: str | None
) -> None:
    run, registry = run_config(write_model_folder(tmp_path), **sections), PluginHost.load(["distillation"]).registry
    with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
        check_reading(run, registry)


def test_a_model_of_a_loss_needs_the_head_that_the_loss_reads(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path)
    for head in ("vocabulary", "score"):
        frozen = {"reference": {"path": str(folder), "head": head}}
        model = ModelConfig.model_validate({"path": str(folder), "frozen": frozen})
        run = run_config(folder, model=model, loss=REFERENCE)
        if head == "vocabulary":
            check_trainable(run)
        else:
            with pytest.raises(ModelError, match=r"^model\.frozen\.reference\.head: is score, and loss 'distillation'"):
                check_trainable(run)


class _AnchoredConfig(BradleyTerryConfig):
    """The loss of a reward model that stays near the one that it was."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"reference"})


def test_a_score_head_that_is_trained_beside_adapters_has_no_reference(tmp_path: Path) -> None:
    model = {"path": str(write_tiny_model(tmp_path)), "head": "score"}
    backend = LocalBackendConfig(lora=LoraConfig())
    run = run_config(tmp_path, model=ModelConfig.model_validate(model), loss=_AnchoredConfig(), backend=backend)
    with pytest.raises(ConfigError, match=r"backend\.lora trains the score head"):
        check_trainable(run)
    frozen = {"reference": {"path": str(tmp_path), "head": "score"}}
    check_trainable(run.model_copy(update={"model": ModelConfig.model_validate({**model, "frozen": frozen})}))
    frozen["judge"] = frozen["reference"]
    with pytest.raises(ModelError, match=r"model\.frozen\.judge\.path: .* has no score head.*RUN_DIR/model"):
        check_trainable(run.model_copy(update={"model": ModelConfig.model_validate({**model, "frozen": frozen})}))


def test_an_advantage_cannot_read_logprobs_of_a_score_head() -> None:
    frozen = {"teacher": {"path": "models/tiny", "head": "score"}}
    environment = {"name": "single_turn", "rewards": "exact_match"}
    settings = {
        "plugins": ["distillation"],
        "model": {"path": "models/tiny", "frozen": frozen},
        "data": {"train": "d.jsonl"},
        "steps": 1,
        "source": {"name": "rollouts", "advantage": "teacher", "environment": environment},
    }
    with pytest.raises(ConfigError, match=r"advantage\.name is teacher, which reads the logprobs of 'teacher'"):
        load_config(settings)


@pytest.mark.parametrize("role", ["reference", "teacher"])
def test_a_teacher_of_its_own_chooses_its_own_experts(tmp_path: Path, role: str) -> None:
    experts = {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    policy, teacher = (write_tiny_moe_model(tmp_path / str(seed), seed=seed, **experts) for seed in (0, 7))
    samples = make_samples([9, 12], loss_share=1.1)
    plain = lay_out(samples)
    model = ModelConfig.model_validate({"path": str(policy), "frozen": {role: {"path": str(teacher)}}})
    backend = local_backend(policy, run={"model": model, "source": replaying_source()})
    found: list[Tensor] = []

    class Noting(Distillation):
        def from_logits(self, policy: Distribution, others: Any, columns: Any) -> dict[str, Tensor]:
            found.append(others[role].logprobs)
            return super().from_logits(policy, others, columns)

    for batch in (plain, with_experts(plain, random_experts(samples))):
        backend.evaluate(batch, Objective(Noting(DistillationConfig(teacher=role)), 1.0))
    torch.testing.assert_close(*found)
