"""Ranks compute together what one process computes alone, also those that have nothing to do in a micro-batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from backend_batches import excite, lay_out, local_backend, make_samples, no_other, write_model_folder
from torch import Tensor, nn

from spurline.data.batch import TrainingBatch
from spurline.protocols.loss import MetricValues, Objective, TokenLossInputs
from spurline_models.accumulate import StepSums, SumsPart, accumulate_gradients, evaluation_sums, logprobs_of
from spurline_models.dealing import RankShare, deal
from spurline_models.device_profile import device_profile
from spurline_models.local.backend import LocalBackend
from spurline_models.streams.token_stream import TokenStream, share_streams
from spurline_rl.losses.algorithms import Gspo
from spurline_rl.losses.configs import GspoConfig
from spurline_rl.testing.backend_contract import assert_gradients_close

PROFILE = device_profile("cpu")
COLUMNS = ("advantages", "old_logprobs")


class NeverOnIdle(Gspo):
    """Has extremes and metrics of a part of the tokens, and fails where it sees a token without weight."""

    def metrics(self, inputs: TokenLossInputs) -> Mapping[str, MetricValues]:
        advantages = inputs.columns["advantages"]
        # Few tokens have a large advantage, so that some micro-batches have none of them.
        part = (advantages, (advantages > 1.3).float() * advantages)
        parts = {"part/mean": part, "part/min": part, "none/mean": (advantages, 0 * advantages)}
        return {**super().metrics(inputs), **parts, "none/max": (advantages, 0 * advantages)}

    def token_loss(self, inputs: TokenLossInputs) -> Tensor:
        assert len(inputs.logprobs) > 0
        assert bool((inputs.columns["advantages"] != 0).all()), "called on an idle stream"
        return super().token_loss(inputs)


LOSS = NeverOnIdle(GspoConfig())


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> LocalBackend:
    return excite(local_backend(write_model_folder(tmp_path_factory.mktemp("model"))))


def batch_of(lengths: tuple[int, ...] = (5, 9, 14, 3, 11)) -> TrainingBatch:
    # The last row has no loss: a stream of it alone is an idle one.
    samples = make_samples(lengths, seed=3, loss_share=1.1)
    samples[-1] = dataclasses.replace(samples[-1], weights=(0.0,) * lengths[-1])
    batch = lay_out(samples, padding_rows=2)
    generator = torch.Generator().manual_seed(0)
    shape = batch.tokens["input_ids"].shape
    advantages = torch.rand(shape, generator=generator) + 0.5
    return batch.with_tokens(advantages=advantages, old_logprobs=-4 * torch.rand(shape, generator=generator))


def shares_of(batch: TrainingBatch, ranks: int) -> tuple[RankShare, ...]:
    return deal(batch, ranks, columns=COLUMNS, max_tokens=16, hidden=32).shares


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_gradients_and_sums_of_ranks_add_up_to_those_of_one_process(backend: LocalBackend, ranks: int) -> None:
    batch, objective = batch_of(), Objective(LOSS, 7.0)
    expected = list(backend.gradients(batch, objective))
    model, parts = backend._model, []
    for share in shares_of(batch, ranks):
        sums = accumulate_gradients(model, share_streams(share, COLUMNS, PROFILE), objective, PROFILE, no_other)
        parts.append(sums.fetch()[0])
    # Gradients of all ranks have been added to the one model's, as a sum over ranks would.
    got = [(name, value.grad) for name, value in model.causal.named_parameters()]
    model.causal.zero_grad()
    assert_gradients_close(got, expected, 1e-5)
    metrics = SumsPart.join(parts).metrics()
    wanted = backend.update(batch, objective)
    for name in ("policy/sequence_ratio", "policy/sequence_ratio/max", "policy/sequence_ratio/min"):
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-5), name
    values, weights = (batch.tokens[name][batch.tokens["loss_weights"] != 0] for name in ("advantages", "loss_weights"))
    weights = torch.where(values > 1.3, weights * values, 0.0)
    assert metrics["part/mean"] == pytest.approx(float((weights * values).sum() / weights.sum()), rel=1e-5)
    assert metrics["part/min"] == wanted["part/min"] == float(values[values > 1.3].min())
    assert not {"none/mean", "none/max"} & {*metrics, *wanted}, "no token has a weight in them"
    joined = SumsPart.join(parts)
    assert joined.loss / 7.0 == pytest.approx(wanted["loss"], rel=1e-5)
    assert joined.tokens == wanted["loss_tokens"]


def test_an_idle_rank_runs_the_model_and_gives_every_parameter_a_gradient_of_zeros(backend: LocalBackend) -> None:
    model = backend._model
    runs: list[nn.Module] = []
    handle = model.decoder.register_forward_hook(lambda module, *_: runs.append(module))
    idle = [(np.zeros(0, np.int64), TokenStream.idle(COLUMNS, PROFILE))] * 2
    try:
        sums = accumulate_gradients(model, idle, Objective(LOSS, 7.0), PROFILE, no_other)
        gradients = [value.grad for value in model.causal.parameters()]
        evaluated = evaluation_sums(model, idle, Objective(LOSS, 1.0), PROFILE, no_other)
        nothing = logprobs_of(model, idle, batch_of(), 1.0, PROFILE)
    finally:
        handle.remove()
        model.causal.zero_grad()
    assert len(runs) == 6
    assert all(gradient is not None and not gradient.any() for gradient in gradients)
    assert sums.fetch()[0] == evaluated == SumsPart()
    assert not nothing.any()


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_evaluation_and_logprobs_of_ranks_are_those_of_one_process(backend: LocalBackend, ranks: int) -> None:
    batch, objective = batch_of(), Objective(LOSS, 1.0)
    model = backend._model
    dealing = deal(batch, ranks, columns=COLUMNS, max_tokens=16, hidden=32)
    parts = [
        evaluation_sums(model, share_streams(share, COLUMNS, PROFILE), objective, PROFILE, no_other)
        for share in dealing.shares
    ]
    got, wanted = SumsPart.join(parts).as_loss_sums(), backend.evaluate(batch, objective)
    assert got.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert (got.weight, got.tokens) == (wanted.weight, wanted.tokens)
    assert got.metrics == pytest.approx(dict(wanted.metrics), rel=1e-5)
    assert got.metric_weights == pytest.approx(dict(wanted.metric_weights), rel=1e-5)
    assert "part/mean" in got.metric_weights
    logprobs = [logprobs_of(model, share_streams(s, (), PROFILE), s.batch, 0.7, PROFILE) for s in dealing.shares]
    torch.testing.assert_close(dealing.gather(logprobs), backend.logprobs(batch, temperature=0.7), rtol=1e-5, atol=1e-5)


def test_a_value_without_weight_may_be_infinite_or_not_a_number() -> None:
    sums = StepSums()
    values, own = torch.tensor([1.0, math.inf, math.nan, 2.0]), torch.tensor([1.0, 0.0, 0.0, 3.0])
    for name in ("mean", "a/max", "a/min"):
        sums._add_metric(name, (values, own), torch.ones(4))
    assert sums.fetch()[0].metrics() == {"mean": 7 / 4, "a/max": 2.0, "a/min": 1.0}


def test_extremes_of_ranks_join_and_a_broken_one_stays_visible() -> None:
    def part(extremes: Mapping[str, float]) -> SumsPart:
        return SumsPart(1.0, 2.0, 3, (), {"mean": 4.0}, extremes)

    joined = SumsPart.join([part({"a/max": 1.0, "a/min": 1.0}), SumsPart(), part({"a/max": 5.0, "a/min": -2.0})])
    assert joined == SumsPart(2.0, 4.0, 6, (), {"mean": 8.0}, {"a/max": 5.0, "a/min": -2.0})
    assert joined.metrics() == {"mean": 2.0, "a/max": 5.0, "a/min": -2.0}
    assert math.isnan(SumsPart.join([part({"a/max": 1.0}), part({"a/max": math.nan})]).extremes["a/max"])
