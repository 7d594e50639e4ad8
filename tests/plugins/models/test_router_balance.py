"""The balance loss of routers: against the equations, one sequence at a time, however a batch is laid out and cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, no_other, write_model_folder
from expert_models import write_expert_model
from model_families import Family, family_of, taken_gradients, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.data.batch import TrainingBatch
from spurline.errors import ModelError
from spurline_models.accumulate import accumulate_gradients
from spurline_models.device_profile import device_profile
from spurline_models.probe import check_routers, choose_reading
from spurline_models.streams.stream_model import StreamModel
from spurline_models.streams.token_stream import token_stream
from spurline_rl.testing.backend_cases import assert_gradients_close

NORMALIZER, COEFFICIENT = 7.5, 0.7
OBJECTIVE = cross_entropy(NORMALIZER)
SAMPLES = make_samples([5, 9, 12, 3, 7, 4])
# One without loss: whether it is computed depends on what lies beside it, so it must not count.
SAMPLES[4] = dataclasses.replace(SAMPLES[4], weights=[0.0] * len(SAMPLES[4].weights))
TRAINED = [sample for sample in SAMPLES if any(sample.weights)]
PACKED = [[0, 4], [2], [3, 1, 5]]
PROFILE = device_profile("cpu")
SCORED_BY: dict[str, Any] = {"qwen3_moe": "softmax", "deepseek_v3": "sigmoid", "gpt_oss": "softmax"}


def equations(logits: Tensor, experts: Tensor, scored_by: str) -> Tensor:
    """One layer and sequence, expert by expert. logits: [T, experts]. experts: [T, top_k]."""
    scores = logits.exp() if scored_by == "softmax" else 1 / (1 + (-logits).exp())
    total = torch.zeros(())
    for expert in range(logits.shape[1]):
        taken = sum(int(expert in chosen) for chosen in experts.tolist())
        f = logits.shape[1] / (experts.shape[1] * len(logits)) * taken
        p = sum(token[expert] / token.sum() for token in scores) / len(logits)
        total = total + f * p
    return total


def one_at_a_time(model: PreTrainedModel, scored_by: str) -> tuple[list[tuple[str, Tensor]], float]:
    """Gradients of the objective with the balance loss, and the mean of the latter, as plain transformers has them."""
    model.set_attn_implementation("eager")
    seen: list[Any] = []
    names = ("mlp.gate", "mlp.router")
    routers = [module for name, module in model.named_modules() if name.endswith(names)]
    handles = [router.register_forward_hook(lambda _, __, output: seen.append(output)) for router in routers]
    objective, values = torch.zeros(()), 0.0
    for sample in TRAINED:
        seen.clear()
        tokens, weights = torch.tensor([sample.tokens]), torch.tensor(sample.weights[1:])
        logits = model(input_ids=tokens, use_cache=False).logits[0, :-1]
        losses = F.cross_entropy(logits, tokens[0, 1:], reduction="none")
        assert seen
        value = sum(equations(output[0], output[2], scored_by) for output in seen) / len(seen)
        objective = objective + (losses * weights).sum() / NORMALIZER + COEFFICIENT * value / len(TRAINED)
        values += float(torch.as_tensor(value).detach())
    objective.backward()
    for handle in handles:
        handle.remove()
    return taken_gradients(model), values / len(TRAINED)


def as_a_batch(
    model: StreamModel, batch: TrainingBatch, cuts: int, *, share: slice = slice(None)
) -> tuple[list[tuple[str, Tensor]], float]:
    """Gradients and mean of the balance loss over so many micro-batches. share: the rows that this rank has."""
    parts = np.array_split(np.arange(batch.num_rows)[share], cuts)
    streams = [(rows, token_stream(batch, rows, (), PROFILE)) for rows in parts]
    balance = COEFFICIENT / batch.num_trained_segments
    kept = [(rows, stream) for rows, stream in streams if stream is not None]
    sums = accumulate_gradients(model, kept, OBJECTIVE, PROFILE, no_other, balance=balance).fetch()[0]
    assert sums.balance is not None
    return taken_gradients(model.causal), sums.balance / batch.num_trained_segments


@pytest.mark.parametrize("model_type", SCORED_BY)
def test_gradients_are_those_of_the_equations_however_a_batch_is_laid_out_and_cut(model_type: str) -> None:
    model = tiny_model(family_of(model_type)).train()
    wanted, value = one_at_a_time(model, SCORED_BY[model_type])
    streams = StreamModel(model)
    padded, left = lay_out(SAMPLES), lay_out(SAMPLES, left=True, padding_rows=2)
    packed = lay_out(SAMPLES, PACKED, gap=1)
    assert padded.num_trained_segments == packed.num_trained_segments == len(TRAINED)
    for batch, cuts in ((padded, 1), (padded, 6), (left, 3), (packed, 1), (packed, 3)):
        found, mean = as_a_batch(streams, batch, cuts)
        assert_gradients_close(found, wanted, 1e-5, cancels_below=1e-3)
        assert mean == pytest.approx(value, rel=1e-5)
    # In rows of one sequence, as models read that mix tokens elsewhere: padding has experts too.
    streams.read_as("rows")
    assert_gradients_close(as_a_batch(streams, packed, 1)[0], wanted, 1e-5, cancels_below=1e-3)
    # Computed again in the backward pass, it counts once.
    streams.read_as("stream")
    streams.checkpoint_activations(PROFILE.checkpoint_options())
    found, mean = as_a_batch(streams, packed, 2)
    assert_gradients_close(found, wanted, 1e-5, cancels_below=1e-3)
    assert mean == pytest.approx(value, rel=1e-5)


def test_the_loss_is_told_and_changes_gradients_but_not_the_loss(tmp_path: Path) -> None:
    path = write_expert_model(tmp_path, router_aux_loss_coef=0.05)
    batch = lay_out(SAMPLES, PACKED)
    runs = {
        wanted: local_backend(path, run={"model": ModelConfig(path=str(path), init="random", router_aux_loss=wanted)})
        for wanted in (None, 0.05, "config")
    }
    gradients = {wanted: dict(backend.gradients(batch, OBJECTIVE)) for wanted, backend in runs.items()}
    metrics = {wanted: backend.update(batch, OBJECTIVE) for wanted, backend in runs.items()}
    assert "moe/aux_loss" not in metrics[None]
    assert 1 <= metrics[0.05]["moe/aux_loss"] < 8 / 3
    assert metrics[0.05]["loss"] == metrics[None]["loss"]
    assert metrics[0.05]["grad_norm"] != metrics[None]["grad_norm"]
    for name, gradient in gradients[0.05].items():
        assert torch.equal(gradient, gradients["config"][name]), name
        if name.endswith("mlp.gate.weight"):
            assert float((gradient - gradients[None][name]).norm() / gradient.norm()) > 1e-2
    assert runs["config"].evaluate(batch, OBJECTIVE).loss == runs[0.05].evaluate(batch, OBJECTIVE).loss


def test_a_model_without_routers_or_coefficient_is_refused(tmp_path: Path) -> None:
    dense, experts = write_model_folder(tmp_path / "dense"), write_expert_model(tmp_path / "experts")
    (experts / "config.json").write_text(
        (experts / "config.json").read_text().replace("{", '{"router_aux_loss_coef": 0.0, ', 1)
    )
    for path, wanted, message in (
        (dense, 0.1, "router_aux_loss is 0.1, and .* has no routers to balance. Remove model.router_aux_loss"),
        (experts, "config", "has no router_aux_loss_coef above 0. Set model.router_aux_loss to a number"),
    ):
        with pytest.raises(ModelError, match=message):
            local_backend(
                path, run={"model": ModelConfig(path=str(path), init="random", router_aux_loss=wanted)}, probe=False
            )


def test_routers_that_make_scores_in_another_way_are_refused() -> None:
    settings = family_of("qwen3_moe").settings
    model = StreamModel(tiny_model(Family("phimoe", settings=settings)))
    choose_reading(model, PROFILE)
    with pytest.raises(ModelError, match=r"has a router of class PhimoeTopKRouter.* Remove model.router_aux_loss"):
        check_routers(model, PROFILE, "phimoe", replays=False, balances=True)
