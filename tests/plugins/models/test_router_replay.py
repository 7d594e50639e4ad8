"""Replayed experts in the local backend, against a mixture of experts written by hand, and the loads of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import cross_entropy, excite, lay_out, local_backend, make_samples, write_model_folder
from expert_models import (
    EXPERTS,
    LAYERS,
    TOP_K,
    by_hand,
    loss_by_hand,
    random_experts,
    replaying_source,
    with_experts,
    write_expert_model,
)
from hypothesis import given
from hypothesis import strategies as st

from spurline.errors import DataError, ModelError
from spurline.protocols.loss import Objective
from spurline_models.device_profile import KeepDouble
from spurline_models.experts.router_replay import ExpertLoads, ExpertRouting, load_metrics
from spurline_models.local.backend import LocalBackend
from spurline_models.optimizers.configs import AdamWConfig
from spurline_rl.losses.configs import ValueLossConfig
from spurline_rl.testing.backend_cases import assert_gradients_close

OBJECTIVE = cross_entropy(7.5)
SAMPLES = make_samples([5, 9, 12, 3, 7, 2])
CHOSEN = random_experts(SAMPLES)
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"rows": None},
    "padded on the left": {"rows": None, "left": True, "padding_rows": 2},
    "packed": {"rows": [[0, 4], [2], [3, 1, 5]], "gap": 1},
}


def batch_of(layout: str) -> Any:
    return with_experts(lay_out(SAMPLES, **LAYOUTS[layout]), CHOSEN, LAYOUTS[layout]["rows"])


def make_backend(folder: Path, *, model: dict[str, Any] | None = None, **settings: Any) -> LocalBackend:
    path = write_expert_model(folder / "model", **(model or {}))
    return excite(local_backend(path, run={"source": replaying_source()}, **({"precision": "fp64"} | settings)))


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_gradients_with_replayed_experts_are_those_of_experts_computed_by_hand(
    tmp_path: Path, normalizes: bool, checkpointing: bool
) -> None:
    backend = make_backend(
        tmp_path, model={"norm_topk_prob": normalizes}, activation_checkpointing=checkpointing, rows_per_microbatch=2
    )
    causal = by_hand(backend._model.causal)
    with KeepDouble():
        loss_by_hand(causal, SAMPLES, CHOSEN, 7.5).backward()
    expected = {name: parameter.grad for name, parameter in causal.named_parameters()}
    found = dict(backend.gradients(batch_of("packed"), OBJECTIVE))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert float((gradient - expected[name]).norm() / expected[name].norm()) <= 1e-10, name
    routers = [gradient for name, gradient in found.items() if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    assert all(float(gradient.norm()) > 1e-4 for gradient in routers)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_model_but_the_critic_uses_the_experts_of_the_batch(tmp_path: Path, layout: str) -> None:
    path = write_expert_model(tmp_path / "model")
    critic = {"optimizer": AdamWConfig(), "loss": ValueLossConfig()}
    run = {"source": replaying_source(), "critic": critic}
    backend = local_backend(path, run=run, precision="fp64")
    batch, free = batch_of(layout), lay_out(SAMPLES, **LAYOUTS[layout])
    expected = with_loss(by_hand(backend._model.causal), batch)
    policy, reference = backend.logprobs(batch), backend.logprobs(batch, "reference")
    real = ~batch.is_padding_row
    assert float((policy - expected[real]).abs().max()) < 1e-6
    assert torch.equal(policy, reference)
    assert float((policy - backend.logprobs(free)).abs().max()) > 1e-3
    assert torch.equal(backend.logprobs(batch, "critic"), backend.logprobs(free, "critic"))


def with_loss(causal: Any, batch: Any) -> torch.Tensor:
    """Logprobs by hand where there is loss, [rows, length]."""
    found = torch.zeros(batch.num_rows, batch.length)
    ids, tokens, weights = (batch.tokens[name] for name in ("segment_ids", "input_ids", "loss_weights"))
    for row in range(batch.num_rows):
        for segment in range(1, int(ids[row].max()) + 1):
            (where,) = torch.nonzero(ids[row] == segment, as_tuple=True)
            causal.chosen = batch.tokens["routed_experts"][row, where].numpy()
            with torch.no_grad(), KeepDouble():
                logits = causal(input_ids=tokens[row, where][None], use_cache=False).logits[0].log_softmax(-1)
            own = logits[:-1].gather(-1, tokens[row, where[1:], None]).squeeze(-1)
            found[row, where[1:]] = torch.where(weights[row, where[1:]] != 0, own.float(), 0.0)
    return found


def test_models_of_one_process_know_nothing_of_each_others_experts(tmp_path: Path) -> None:
    one, other = (make_backend(tmp_path / name) for name in ("one", "other"))
    free = lay_out(SAMPLES)
    before = other.logprobs(free)
    with other._model.routing.noting() as noted:
        one.logprobs(batch_of("padded"))
        assert noted == {}
    assert torch.equal(other.logprobs(free), before)


def test_models_without_known_routers_are_refused(tmp_path: Path) -> None:
    dense = write_model_folder(tmp_path / "dense")
    with pytest.raises(ModelError, match=r"router_replay is true.* no router is known"):
        local_backend(dense, run={"source": replaying_source()})


def test_experts_of_another_model_are_refused(tmp_path: Path) -> None:
    backend = make_backend(tmp_path)
    experts = [chosen[:, :, :2] for chosen in CHOSEN]
    with pytest.raises(DataError, match="2 experts in each of 2 layers for a token, and the model has 3 in 2 layers"):
        backend.logprobs(with_experts(lay_out(SAMPLES), experts))


@pytest.mark.parametrize(("place", "number"), [((slice(None),), EXPERTS), ((0,), -2), ((1,), -1)])
def test_experts_that_the_model_has_not_are_refused_before_it_computes(
    tmp_path: Path, place: tuple[Any, ...], number: int
) -> None:
    """Beyond its experts, below what stands for none, and none for a part of a token's experts."""
    backend = make_backend(tmp_path)
    experts = random_experts(SAMPLES, unknown=0.0)
    experts[2][4, 1][place] = number
    with pytest.raises(DataError, match=f"have expert {number} for a token, and the model has 0 to 7"):
        backend.logprobs(with_experts(lay_out(SAMPLES), experts))


def test_a_router_that_ignores_what_is_replayed_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExpertRouting, "_take", lambda self, number, layer, args, kwargs: (args, kwargs))
    with pytest.raises(ModelError, match="does not pass recorded experts on to the Qwen3MoeTopKRouter of layer 0"):
        make_backend(tmp_path)


def expected_metrics(experts: Any) -> dict[str, float]:
    """By counting [tokens, layers, top_k] one after the other."""
    counts = np.zeros((LAYERS, EXPERTS))
    for token in experts:
        for layer, chosen in enumerate(token):
            for expert in chosen:
                counts[layer, expert] += 1
    ratios = counts.max(1) / counts.mean(1)
    return {
        "moe/imbalance": float(ratios.mean()),
        "moe/imbalance/max": float(ratios.max()),
        "moe/idle_experts": float((counts == 0).mean()),
    }


@pytest.mark.parametrize(
    "settings",
    [{}, {"rows_per_microbatch": 2}, {"activation_checkpointing": True, "max_tokens_per_microbatch": 12}],
    ids=str,
)
def test_an_update_says_how_evenly_its_tokens_went_to_the_experts(tmp_path: Path, settings: dict[str, Any]) -> None:
    backend = local_backend(write_expert_model(tmp_path), **settings)
    chosen = random_experts(SAMPLES, unknown=0.0)
    metrics = backend.update(with_experts(lay_out(SAMPLES, gap=2), chosen), OBJECTIVE)
    expected = expected_metrics(np.concatenate(chosen))
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-12)


def test_only_updates_count_and_dense_models_have_no_such_metric(tmp_path: Path) -> None:
    backend = local_backend(write_expert_model(tmp_path / "experts"))
    batch = lay_out(SAMPLES)
    backend.logprobs(batch)
    backend.evaluate(batch, OBJECTIVE)
    first = backend.update(batch, Objective(OBJECTIVE.loss, 1e9))
    assert 1 < first["moe/imbalance"] <= first["moe/imbalance/max"] <= EXPERTS / TOP_K
    dense = local_backend(write_model_folder(tmp_path / "dense"))
    assert not any(name.startswith("moe/") for name in dense.update(batch, OBJECTIVE))


@given(st.lists(st.lists(st.lists(st.integers(0, 20), min_size=4, max_size=4), min_size=2, max_size=2), max_size=4))
def test_ranks_may_count_any_part_of_the_tokens_and_layers(counts: list[list[list[int]]]) -> None:
    """counts: per rank, layer and expert."""
    parts = [{layer: np.array(tokens) for layer, tokens in enumerate(rank)} for rank in counts]
    whole = np.array(counts).sum(0) if counts else np.zeros((2, 4), np.int64)
    assert load_metrics(parts) == pytest.approx(load_metrics([dict(enumerate(whole))]))
    assert bool(load_metrics(parts)) == bool(whole.any())


def test_only_tokens_of_samples_are_counted() -> None:
    loads = ExpertLoads()
    loads.add(3, torch.tensor([[7, 7], [0, 1], [1, 2]]), 8, slice(1, None))
    loads.add(3, torch.tensor([[7, 7], [0, 1], [1, 2]]), 8, torch.tensor([2]))
    [(layer, load)] = loads.fetch().items()
    assert (layer, load.tolist()) == (3, [1, 3, 2, 0, 0, 0, 0, 0])


def test_padding_of_rows_is_not_counted_and_keeps_recorded_experts_apart(tmp_path: Path) -> None:
    """A model that reads rows gives the metrics and gradients of one that reads the stream."""
    chosen = random_experts(SAMPLES, unknown=0.2)
    batch = with_experts(lay_out(SAMPLES, gap=2), chosen)
    stream, rows = (local_backend(write_expert_model(tmp_path)) for _ in range(2))
    rows._model.read_as("rows")
    wanted = stream.gradients(batch, OBJECTIVE)
    assert_gradients_close(rows.gradients(batch, OBJECTIVE), wanted, 1e-5, cancels_below=1e-3)
    loads = [
        {name: value for name, value in backend.update(batch, OBJECTIVE).items() if name.startswith("moe/")}
        for backend in (stream, rows)
    ]
    assert loads[0].keys() == loads[1].keys()
    assert loads[0] == pytest.approx(loads[1], rel=1e-5)
