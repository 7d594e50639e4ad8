"""What plan says of weights, gradients and optimizer is what ranks have really allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from backend_batches import lay_out, make_samples
from fsdp_layouts import on

from spurline.protocols.loss import Objective
from spurline_models.dealing import deal
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_ranks.launch import open_ranks
from spurline_ranks.messages import plain_objective, plain_run
from spurline_rl.testing.backend_runs import backend_run

pytestmark = pytest.mark.processes

ODD = {"vocab_size": 515, "hidden_size": 130, "intermediate_size": 255}
"""Sizes that two ranks do not divide evenly."""


def allocated(run: Any, objective: Objective) -> dict[str, int]:
    """On the fullest rank."""
    config = run.backend
    shares = deal(lay_out(make_samples([9, 21, 4, 33])), config.layout().data).shares
    worker = "fsdp_measuring:MeasuringRank"
    ranks = open_ranks(config.rank_request(), worker, (plain_run(run), 8), config.limits)
    try:
        wires = [share.to_wire() for share in shares]
        ranks.call("build")
        answers = ranks.call("allocated", plain_objective(objective), per_rank=wires)
    finally:
        ranks.close()
    return {part: max(answer[part] for answer in answers) for part in answers[0]}


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16"}, {"ranks": 3}, {"lora": {"rank": 5, "base_dtype": "bf16"}}, {"expert": 2}],
    ids=str,
)
def test_weights_gradients_and_optimizer_are_what_a_plan_says(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = write_tiny_moe_model(tmp_path) if "expert" in settings else write_tiny_model(tmp_path, **ODD)
    backend = {"name": "fsdp", "device": "cpu", "ranks": 2, "num_threads": 1, "probe": False, **settings}
    loaded = backend_run(model, backend, ("fsdp_backend",))
    loss = loaded.host.registry.create("loss", loaded.config.loss)
    measured = allocated(loaded.config, Objective(loss, 64.0))
    said = loaded.config.backend.estimate_memory(loaded.config, 33, 67).parts
    for part in ("weights", "gradients", "optimizer"):
        assert said[part] == pytest.approx(measured[part], rel=0.05), part


def test_what_is_noted_for_a_backward_pass_does_not_grow_without_one(spurline_tiny_model: Path) -> None:
    run = backend_run(spurline_tiny_model, on(1), ("fsdp_backend",))
    config: Any = run.config.backend
    objective = plain_objective(Objective(run.host.registry.create("loss", run.config.loss), 64.0))
    (share,) = deal(lay_out(make_samples([9, 21, 4, 33])), config.layout().data).shares
    wires = [share.to_wire()]
    ranks = open_ranks(config.rank_request(), "fsdp_measuring:MeasuringRank", (plain_run(run.config), 8), config.limits)
    try:
        ranks.call("build")
        for _ in range(2):
            ranks.call("logprobs", "policy", 1.0, per_rank=wires)
            ranks.call("evaluate", objective, per_rank=wires)
            assert ranks.call("noted_forwards") == [0]
    finally:
        ranks.close()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_of_sharded_layers_are_moved_and_their_weights_are_not(
    spurline_tiny_model: Path, checkpointing: bool
) -> None:
    run = backend_run(spurline_tiny_model, on(1, activation_checkpointing=checkpointing), ("fsdp_backend",))
    config: Any = run.config.backend
    objective = plain_objective(Objective(run.host.registry.create("loss", run.config.loss), 64.0))
    (share,) = deal(lay_out(make_samples([9, 21, 4, 33])), config.layout().data).shares
    ranks = open_ranks(config.rank_request(), "fsdp_measuring:MeasuringRank", (plain_run(run.config), 8), config.limits)
    try:
        ranks.call("build")
        (found,) = ranks.call("offloaded", objective, per_rank=[share.to_wire()])
    finally:
        ranks.close()
    assert found["equal"]
    assert found["moved"] > 0
    assert not found["weights"]
