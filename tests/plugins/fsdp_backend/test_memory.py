"""What plan says of weights, gradients and optimizer is what ranks have really allocated."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from backend_batches import lay_out, make_samples
from fsdp_layouts import on

from spurline.config.loading import LoadedConfig
from spurline.protocols.loss import Objective
from spurline_models.dealing import deal
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_ranks.group import RankGroup, open_ranks
from spurline_ranks.messages import plain_objective, plain_run
from spurline_rl.testing.backend_runs import backend_run

pytestmark = pytest.mark.processes

ODD = {"vocab_size": 515, "hidden_size": 130, "intermediate_size": 255}
"""Sizes that two ranks do not divide evenly."""


@contextmanager
def measuring(loaded: LoadedConfig) -> Iterator[RankGroup]:
    config: Any = loaded.config.backend
    arguments = plain_run(loaded.config), 8
    ranks = open_ranks(config.rank_request(), "fsdp_measuring:MeasuringRank", arguments, config.limits)
    try:
        ranks.call("build")
        yield ranks
    finally:
        ranks.close()


def step_of(loaded: LoadedConfig) -> tuple[dict[str, Any], list[Any]]:
    """A plain objective, and the wire of each rank's share of a few rows."""
    loss = loaded.host.registry.create("loss", loaded.config.loss)
    shares = deal(lay_out(make_samples([9, 21, 4, 33])), loaded.config.backend.layout().data).shares
    return plain_objective(Objective(loss, 64.0)), [share.to_wire() for share in shares]


@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16"}, {"ranks": 3}, {"lora": {"rank": 5, "base_dtype": "bf16"}}, {"expert": 2}],
    ids=str,
)
def test_weights_gradients_and_optimizer_are_what_a_plan_says(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = write_tiny_moe_model(tmp_path) if "expert" in settings else write_tiny_model(tmp_path, **ODD)
    backend = {"name": "fsdp", "device": "cpu", "ranks": 2, "num_threads": 1, "probe": False, **settings}
    loaded = backend_run(model, backend, ("fsdp_backend",))
    objective, wires = step_of(loaded)
    with measuring(loaded) as ranks:
        answers = ranks.call("allocated", objective, per_rank=wires)
    said = loaded.config.backend.estimate_memory(loaded.config, 33, 67).parts
    for part in ("weights", "gradients", "optimizer"):
        assert said[part] == pytest.approx(max(answer[part] for answer in answers), rel=0.05), part


def test_what_is_noted_for_a_backward_pass_does_not_grow_without_one(spurline_tiny_model: Path) -> None:
    loaded = backend_run(spurline_tiny_model, on(1), ("fsdp_backend",))
    objective, wires = step_of(loaded)
    with measuring(loaded) as ranks:
        for _ in range(2):
            ranks.call("logprobs", "policy", 1.0, per_rank=wires)
            ranks.call("evaluate", objective, per_rank=wires)
            assert ranks.call("noted_forwards") == [0]


def test_inputs_of_sharded_layers_on_the_host_change_no_bit_of_a_gradient(spurline_tiny_model: Path) -> None:
    loaded = backend_run(spurline_tiny_model, on(1, activation_checkpointing=True), ("fsdp_backend",))
    objective, wires = step_of(loaded)
    with measuring(loaded) as ranks:
        assert ranks.call("offloaded", objective, per_rank=wires) == [True]
