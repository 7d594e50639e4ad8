"""Objectives against the papers' numbers, the contract of losses, and any cut of a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import excite, lay_out, local_backend, make_samples, write_model_folder
from torch import Tensor

from spurline.config.loading import load_config
from spurline.data.batch import TrainingBatch
from spurline.errors import ConfigError
from spurline.plugins.host import PluginHost
from spurline.protocols.loss import ENTROPY, Loss, Objective, TokenLossInputs
from spurline_models.dealing import deal
from spurline_models.testing import LossContract
from spurline_objectives.configs import DppoConfig, EntropyTargetConfig, KpopConfig, PpoPerRowConfig
from spurline_objectives.entropy_target import EntropyTarget
from spurline_objectives.trust_regions import Dppo, Kpop, PpoPerRow, binary_kl
from spurline_rl.losses.corrections import compare
from spurline_rl.testing.backend_cases import assert_gradients_close

REFERENCE: Any = json.loads((Path(__file__).parent / "published" / "reference.json").read_text(encoding="utf-8"))
PLAIN: dict[str, Any] = {"entropy_metric": False}
MIXED: dict[str, Any] = {"kl": {"coefficient": 0.1}, "entropy_coefficient": 0.05}


class TestDppo(LossContract):
    def make_loss(self) -> Loss:
        return Dppo(DppoConfig(divergence="kl", threshold_low=0.01, threshold_high=0.02, **MIXED))


class TestDppoAroundTheOldPolicy(LossContract):
    def make_loss(self) -> Loss:
        return Dppo(DppoConfig(anchor="old"))


class TestPpoPerRow(LossContract):
    def make_loss(self) -> Loss:
        return PpoPerRow(PpoPerRowConfig(**MIXED))


class TestEntropyTarget(LossContract):
    def make_loss(self) -> Loss:
        return EntropyTarget(EntropyTargetConfig(kl={"coefficient": 0.1}))


def reference_inputs(loss: Loss) -> TokenLossInputs:
    columns = {name: torch.tensor(values, dtype=torch.float64) for name, values in REFERENCE["batch"].items()}
    logprobs = columns.pop("logprobs").requires_grad_()
    segment_index = torch.zeros(len(logprobs), dtype=torch.int64)
    return TokenLossInputs(logprobs, segment_index, 1, {name: columns[name] for name in loss.needs})


@pytest.mark.parametrize("name", ["dppo tv", "dppo kl", "ppo_per_row"])
def test_losses_and_gradients_are_those_of_the_papers(name: str) -> None:
    loss: Loss
    if name == "ppo_per_row":
        loss = PpoPerRow(PpoPerRowConfig(**PLAIN))
    else:
        divergence = name.removeprefix("dppo ")
        low, high, max_ratio = REFERENCE["settings"][divergence]
        settings = {"threshold_low": low, "threshold_high": high, "max_ratio": max_ratio}
        loss = Dppo(DppoConfig(divergence=divergence, **settings, **PLAIN))
    inputs = reference_inputs(loss)
    wanted, gradient = REFERENCE["wanted"][name]
    values = loss.token_loss(inputs)
    np.testing.assert_allclose(values.detach().numpy(), wanted, rtol=1e-12, atol=1e-12)
    (found,) = torch.autograd.grad(values.sum(), inputs.logprobs)
    np.testing.assert_allclose(found.numpy(), gradient, rtol=1e-12, atol=1e-12)
    assert 0 < np.count_nonzero(gradient) < len(gradient), "the batch has tokens on both sides of the border"


def reference_batch() -> TrainingBatch:
    """One row with the reference's tokens after a first token without loss."""
    count = len(REFERENCE["batch"]["logprobs"])
    [sample] = make_samples([count + 1], loss_share=1.1)
    batch = lay_out([sample])
    columns = {name: torch.tensor([[0.0, *REFERENCE["batch"][name]]]) for name in ("old_logprobs", "rollout_logprobs")}
    return batch.with_tokens(**columns, loss_weights=torch.tensor([[0.0] + [1.0] * count]))


def test_factors_of_kpop_are_those_of_the_paper() -> None:
    batch, metrics = compare(reference_batch(), Kpop(KpopConfig(threshold=0.03)))
    wanted = REFERENCE["wanted"]["kpop"]
    np.testing.assert_allclose(batch.tokens["correction_factors"][0, 1:].numpy(), wanted, rtol=1e-5)
    assert metrics["correction/rejected"] == pytest.approx(wanted.count(0.0) / len(wanted))


def test_a_token_that_is_certain_has_a_finite_divergence() -> None:
    certain, other = torch.tensor([0.0, -0.5, -1e-9]), torch.tensor([-0.5, 0.0, -1e-9])
    assert bool(torch.isfinite(binary_kl(certain, other)).all())


@pytest.mark.parametrize("distance", [-0.01, 0.01])
def test_a_step_has_the_entropy_bonus_only_below_the_target_whoever_drew_its_tokens(distance: float) -> None:
    # Each token as often as an older policy draws it. The entropy is that of the policy before the update.
    rollout, old = torch.tensor([0.5, 0.25, 0.125, 0.125]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    drawn = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    [sample] = make_samples([9], loss_share=1.1)
    columns = {
        name: torch.cat([torch.zeros(1), values.log()[drawn]]).unsqueeze(0)
        for name, values in (("old_logprobs", old), ("rollout_logprobs", rollout))
    }
    batch = lay_out([sample]).with_tokens(**columns, loss_weights=torch.tensor([[0.0] + [1.0] * 8]))
    target = -float(old @ old.log()) + distance
    loss = EntropyTarget(EntropyTargetConfig(entropy_target=target, entropy_coefficient=0.02))
    column = loss.prepare(batch, lambda role, rows=None: torch.zeros(0))["entropy_coefficients"]
    assert column.unique().tolist() == pytest.approx([0.02 if distance > 0 else 0.0])


def test_the_bonus_does_not_depend_on_the_order_of_tokens() -> None:
    [sample] = make_samples([4], loss_share=1.1)
    # Added from the left, float64 would round to the target.
    values = torch.tensor([0.0, -(2.0**53), -1.0, -1.0])
    loss = EntropyTarget(EntropyTargetConfig(entropy_target=2**53 / 3, entropy_coefficient=0.02))
    for order in ([0, 1, 2, 3], [0, 3, 2, 1]):
        columns = dict.fromkeys(("old_logprobs", "rollout_logprobs"), values[order].unsqueeze(0))
        batch = lay_out([sample]).with_tokens(**columns, loss_weights=torch.tensor([[0.0, 1.0, 1.0, 1.0]]))
        column = loss.prepare(batch, lambda role, rows=None: torch.zeros(0))["entropy_coefficients"]
        assert column.unique().tolist() == [0.0], order


LOSSES: dict[str, Loss] = {
    "dppo tv": Dppo(DppoConfig(threshold_low=0.02, threshold_high=0.03, **MIXED)),
    "dppo kl": Dppo(DppoConfig(divergence="kl", threshold_low=0.004, threshold_high=0.005)),
    "ppo_per_row": PpoPerRow(PpoPerRowConfig()),
    "ppo_entropy_target": EntropyTarget(EntropyTargetConfig(entropy_target=1.0)),
}


@pytest.mark.parametrize("loss", sorted(LOSSES))
@pytest.mark.parametrize(("precision", "tolerance"), [("fp64", 1e-10), ("fp32", 3e-6)])
def test_gradients_are_the_same_for_any_layout_split_and_number_of_ranks(
    loss: str, precision: str, tolerance: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    samples = make_samples([9, 14, 5, 11, 7], 3, loss_share=1.1)
    backend = excite(local_backend(folder, precision=precision))
    plain = with_columns(lay_out(samples), LOSSES[loss], backend)
    objective = Objective(LOSSES[loss], 7.5, 0.8)
    expected = dict(backend.gradients(plain, objective))
    rows = [[3, 0], [4], [1, 2]]
    packed = lay_out(samples, rows, gap=1, left=True, padding_rows=1)
    numbers = [number for row in rows for number in row]
    packed = packed.with_tokens(**{name: moved(plain, packed, name, numbers) for name in needed(LOSSES[loss])})
    split = excite(local_backend(folder, precision=precision, max_tokens_per_microbatch=20, logits_chunk_tokens=3))
    total: dict[str, Tensor] = {}
    for share in deal(packed, 3, columns=[*needed(LOSSES[loss])]).shares:
        for name, gradient in split.gradients(share.batch, objective):
            total[name] = total.get(name, torch.zeros_like(gradient)) + gradient
    assert_gradients_close(total, expected, tolerance, cancels_below=1e-3)


def needed(loss: Loss) -> frozenset[str]:
    return loss.needs - {ENTROPY}


def with_columns(batch: TrainingBatch, loss: Loss, backend: Any) -> TrainingBatch:
    """Add random columns near the backend's logprobs, and those that the loss prepares."""
    generator = torch.Generator().manual_seed(1)
    logprobs = backend.logprobs(batch, temperature=0.8)
    columns: dict[str, Tensor] = {}
    for name in sorted(needed(loss) - getattr(loss, "prepares", frozenset())):
        noise = torch.randn(logprobs.shape, generator=generator)
        columns[name] = (logprobs + 0.3 * noise).clamp(max=0) if name.endswith("_logprobs") else noise
        if name.startswith("clip"):
            columns[name] = 0.3 * torch.rand(logprobs.shape, generator=generator)
    batch = batch.with_tokens(**columns)
    prepare: Any = getattr(loss, "prepare", None)
    return batch if prepare is None else batch.with_tokens(**prepare(batch, backend.logprobs))


def moved(plain: TrainingBatch, packed: TrainingBatch, name: str, numbers: list[int]) -> Tensor:
    """Return the column of the packed batch, whose segments are these rows of the plain one."""
    column = torch.zeros(packed.tokens["input_ids"].shape, dtype=plain.tokens[name].dtype)
    segments = packed.tokens["segment_ids"]
    order = iter(numbers)
    for row in range(packed.num_rows):
        for segment in range(1, int(segments[row].max()) + 1):
            number = next(order)
            column[row, segments[row] == segment] = plain.tokens[name][number, plain.tokens["segment_ids"][number] > 0]
    return column


def test_a_second_ratio_to_the_engine_and_an_entropy_of_other_tokens_are_refused(tmp_path: Path) -> None:
    config = {
        "plugins": ["objectives"],
        "model": {"path": "models/any", "init": "random"},
        "data": {"train": "rows.jsonl"},
        "steps": 1,
        "run_dir": str(tmp_path),
        "source": {"name": "rollouts", "environment": {"rewards": {"right": "exact_match"}}, "advantage": "grpo"},
        "loss": "dppo",
    }
    load_config(config)
    source = {**config["source"], "correction": "kpop"}  # type: ignore[dict-item]  # a mapping
    with pytest.raises(ConfigError, match=r"loss\.anchor is rollout.*a second time"):
        load_config({**config, "source": source})
    load_config({**config, "source": source, "loss": {"name": "dppo", "anchor": "old"}})
    source = {**config["source"], "sampling": {"top_p": 0.9, "top_k": 20}}  # type: ignore[dict-item]  # a mapping
    with pytest.raises(ConfigError, match=r"top_k: 20 leaves out tokens that the bonus counts"):
        load_config({**config, "source": source, "loss": "ppo_entropy_target"})
    source = {**config["source"], "advantage": "gdpo", "cut_off": "penalise"}  # type: ignore[dict-item]  # a mapping
    load_config({**config, "source": source, "loss": "ppo"})
    source["cut_off"] = {"action": "penalise", "penalty": 0.5}
    with pytest.raises(ConfigError, match=r"Set advantage\.weights\.cut_off: 0\.5, and leave it at 1"):
        load_config({**config, "source": source, "loss": "ppo"})


BY_ROW = {
    "name": "by_row",
    "environments": {"a": {"rewards": {"right": "exact_match"}}, "b": {"rewards": {"brief": "exact_match"}}},
}


def by_environment(advantage: Any, other: Any = "grpo") -> dict[str, Any]:
    return {"advantage": {"name": "by_environment", "advantages": {"a": advantage}, "other": other}}


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ({"advantage": "gdpo", "zero_variance": "refill"}, "gdpo compares parts of returns, so these groups teach too"),
        ({"advantage": "turn_grpo", "zero_variance": "refill"}, "turn_grpo compares parts of returns"),
        ({**by_environment("gdpo"), "zero_variance": "refill"}, "by_environment compares parts of returns"),
        ({"advantage": {"name": "gdpo", "weights": {"brief": 0.5}}}, None),
        (
            {"advantage": {"name": "gdpo", "weights": {"turns": 0.5, "rigth": 1}}},
            "weights.rigth .*Did you mean 'right'",
        ),
        ({**by_environment("gdpo"), "reward_weights": {"brief": 0.5}}, None),
        (
            {**by_environment("gdpo"), "reward_weights": {"right": 0.5}},
            r"source\.advantage\.advantages\.a\.name .*Set advantage\.advantages\.a\.weights\.right: 0\.5",
        ),
        (
            {**by_environment("grpo", "gdpo"), "reward_weights": {"brief": 0.5}},
            r"Set advantage\.other\.weights\.brief: 0\.5",
        ),
    ],
)
def test_weights_and_refills_are_checked_for_each_environment(
    source: dict[str, Any], problem: str | None, tmp_path: Path
) -> None:
    config = {
        "plugins": ["objectives", "environments"],
        "model": {"path": "models/any", "init": "random"},
        "data": {"train": "rows.jsonl"},
        "steps": 1,
        "run_dir": str(tmp_path),
        "source": {"name": "rollouts", "environment": BY_ROW, **source},
    }
    if problem is None:
        load_config(config)
    else:
        with pytest.raises(ConfigError, match=problem) as caught:
            load_config(config)
        assert len(caught.value.problems) == 1


def test_the_components_are_registered() -> None:
    names = {entry.name for entry in PluginHost.load(["objectives"]).registry.entries()}
    assert {"dppo", "ppo_per_row", "ppo_entropy_target", "kpop", "gdpo", "turn_grpo"} <= names
