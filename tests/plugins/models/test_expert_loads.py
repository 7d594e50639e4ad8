"""How evenly tokens go to experts: counted by the local backend, and joined over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, write_model_folder
from expert_models import EXPERTS, LAYERS, TOP_K, random_experts, with_experts, write_expert_model
from hypothesis import given
from hypothesis import strategies as st

from spurline.protocols.loss import Objective
from spurline_models.experts.router_replay import ExpertLoads, load_metrics
from spurline_rl.testing.backend_cases import assert_gradients_close

OBJECTIVE = cross_entropy(7.5)
SAMPLES = make_samples([5, 9, 12, 3, 7])


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
