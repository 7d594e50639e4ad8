"""The critic: values by their formula, an optimizer and a checkpoint of its own, and no effect on the policy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import Sample, cross_entropy, lay_out, local_backend, make_samples, write_model_folder

from spurline.config.run_config import CriticConfig
from spurline.data.batch import TrainingBatch
from spurline.errors import CheckpointError
from spurline.protocols.loss import Objective
from spurline.protocols.optimizer import OptimizerConfig
from spurline_models.configs import LoraConfig
from spurline_models.device_profile import KeepDouble
from spurline_models.local.backend import LocalBackend
from spurline_models.optimizers.configs import AdamWConfig, MuonConfig
from spurline_rl.losses.algorithms import ValueLoss
from spurline_rl.losses.configs import ValueLossConfig
from spurline_rl.training_configs import ByPromptConfig

POLICY = cross_entropy(9.0)
VALUES = Objective(ValueLoss(ValueLossConfig(clip=None)), 9.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def with_critic(
    model: Path, warmup_steps: int = 0, optimizer: OptimizerConfig | None = None, **settings: Any
) -> LocalBackend:
    optimizer = optimizer or AdamWConfig(learning_rate=1e-2)
    critic = CriticConfig(
        loss=ValueLossConfig(), minibatches=ByPromptConfig(), optimizer=optimizer, warmup_steps=warmup_steps
    )
    return local_backend(model, run={"critic": critic}, **settings)


def rollouts(lengths: tuple[int, ...] = (9, 12, 5), seed: int = 0) -> tuple[list[Sample], TrainingBatch]:
    """Samples, and their batch with random returns; the first return is that of position 0."""
    samples = make_samples(lengths, seed)
    batch = lay_out(samples)
    generator = torch.Generator().manual_seed(seed)
    columns = {name: torch.randn(batch.num_rows, batch.length, generator=generator) for name in ("values", "returns")}
    return samples, batch.with_tokens(**columns)


def critic_of(backend: LocalBackend) -> Any:
    assert backend._critic is not None
    return backend._critic


def excited(backend: LocalBackend) -> LocalBackend:
    with torch.no_grad():
        critic_of(backend).model.head.weight.copy_(torch.linspace(-1, 1, 32).unsqueeze(0))
    return backend


def test_values_and_gradients_are_those_of_the_decoder_and_a_linear_head(model: Path) -> None:
    backend = excited(with_critic(model, precision="fp64", rows_per_microbatch=2))
    samples, batch = rollouts()
    causal = copy.deepcopy(critic_of(backend).model.causal)
    causal.set_attn_implementation("eager")
    got = backend.logprobs(batch, "critic")
    total = torch.zeros((), dtype=torch.float64)
    with KeepDouble():
        for row, sample in enumerate(samples):
            hidden = causal.get_decoder()(input_ids=torch.tensor([sample.tokens]), use_cache=False).last_hidden_state[0]
            # The value of a token comes from the position before it.
            values = hidden[:-1] @ causal.get_output_embeddings().weight[0]
            count = len(sample.tokens)
            weights = torch.tensor(sample.weights[1:], dtype=torch.float64)
            expected = torch.where(weights != 0, values, 0.0).detach()
            torch.testing.assert_close(got[row, 1:count].to(torch.float64), expected, atol=1e-6, rtol=1e-6)
            total = total + (weights * (values - batch.tokens["returns"][row, 1:count]) ** 2 / 2).sum()
        (total / 9.0).backward()
    gradients = dict(backend.gradients(batch, VALUES, role="critic"))
    assert gradients.keys() == {name for name, _ in causal.named_parameters()}
    for name, value in causal.named_parameters():
        assert value.grad is not None
        torch.testing.assert_close(gradients[name], value.grad, rtol=1e-9, atol=1e-12)


def test_a_critic_with_an_optimizer_of_its_own_learns_and_continues_bit_for_bit(model: Path, tmp_path: Path) -> None:
    groups = [{"match": "lm_head.weight", "learning_rate_scale": 3}]
    optimizer = MuonConfig.model_validate({"learning_rate": 3e-3, "groups": groups})
    backend, resumed = (with_critic(model, optimizer=optimizer) for _ in range(2))
    _, batch = rollouts()
    lines = [backend.update(batch, VALUES, role="critic") for _ in range(30)]
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert lines[-1]["lr/groups.0"] == pytest.approx(9e-3)
    backend.save(tmp_path / "saved")
    resumed.load(tmp_path / "saved")
    for role, objective in (("critic", VALUES), ("policy", POLICY)):
        expected = without_times(backend.update(batch, objective, role=role))
        assert without_times(resumed.update(batch, objective, role=role)) == expected


@pytest.mark.parametrize("settings", [{}, {"lora": LoraConfig(rank=2, dropout=0.2)}])
def test_loading_continues_both_bit_for_bit_with_dropout_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = write_model_folder(tmp_path / "model", attention_dropout=0.3)
    backend = with_critic(model, **settings)
    train(backend, 0)
    backend.save(tmp_path / "saved")
    expected = [train(backend, seed) for seed in (1, 2)]
    resumed = with_critic(model, **settings)
    resumed.load(tmp_path / "saved")
    assert [train(resumed, seed) for seed in (1, 2)] == expected


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_critic_is_named_and_nothing_is_loaded(tmp_path: Path, model: Path, name: str) -> None:
    saved = with_critic(model)
    train(saved, 0)
    saved.save(tmp_path / "saved")
    (tmp_path / "saved" / "critic" / name).unlink()
    backend = with_critic(model)
    before = {key: value.clone() for key, value in backend.named_weights()}
    with pytest.raises(CheckpointError, match=f"critic/{name}:? (is )?missing"):
        backend.load(tmp_path / "saved")
    assert all(torch.equal(value, before[key]) for key, value in backend.named_weights())


def train(backend: LocalBackend, seed: int) -> list[dict[str, float]]:
    _, batch = rollouts(seed=seed)
    return [without_times(backend.update(batch, VALUES, role="critic")), without_times(backend.update(batch, POLICY))]


def without_times(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}
