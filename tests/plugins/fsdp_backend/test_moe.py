"""Models with experts: what they need to be divided, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsdp_layouts import on

from spurline import load_config
from spurline.errors import ConfigError, ModelError
from spurline_fsdp_backend import configs
from spurline_models.testing import write_tiny_model, write_tiny_moe_model
from spurline_rl.testing.backend_cases import assert_gradients_close, minibatch
from spurline_rl.testing.backend_runs import backend_run, opened


def run_of(backend: dict[str, Any]) -> dict[str, Any]:
    return {
        "plugins": ["fsdp_backend"],
        "model": {"path": "unused"},
        "data": {"train": "unused.jsonl"},
        "steps": 1,
        "backend": backend,
    }


@pytest.mark.parametrize(
    ("experts", "message"), [(None, "the model has no experts. Set expert to 1"), (3, "does not divide the 3 experts")]
)
def test_models_whose_experts_ranks_cannot_share_equally_are_refused_before_ranks_start(
    tmp_path: Path, experts: int | None, message: str
) -> None:
    model = write_tiny_model(tmp_path) if experts is None else write_tiny_moe_model(tmp_path, num_experts=experts)
    run = backend_run(model, on(2, expert=2), ("fsdp_backend",))
    with pytest.raises(ConfigError, match=message), opened(run):
        pass


def test_a_transformers_that_cannot_divide_experts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "version", lambda name: "5.22.2")
    load_config(run_of(on(2)))
    with pytest.raises(ConfigError, match=r"backend\.expert needs transformers 5\.23\. 5\.22\.2 is installed"):
        load_config(run_of(on(2, expert=2)))


@pytest.mark.processes
def test_experts_that_no_layer_has_are_refused_with_the_way_out(tmp_path: Path) -> None:
    run = backend_run(write_tiny_moe_model(tmp_path, mlp_only_layers=[0, 1]), on(2, expert=2), ("fsdp_backend",))
    with (
        pytest.raises(ModelError, match=r"cannot divide the experts of .* Qwen3MoeForCausalLM. Set expert to 1"),
        opened(run),
    ):
        pass


@pytest.mark.parametrize("settings", [{"context": 2}, {"compile": True}], ids=str)
def test_layouts_in_which_no_rank_sees_whole_sequences_of_routers_are_refused(settings: dict[str, Any]) -> None:
    run = run_of({"name": "fsdp", "device": "cpu", "ranks": 2, **settings})
    run["model"]["router_aux_loss"] = 0.1
    with pytest.raises(ConfigError, match=r"model\.router_aux_loss .* backend 'fsdp' with these settings"):
        load_config(run)


@pytest.mark.processes
def test_ranks_balance_routers_as_one_process_does(tmp_path: Path) -> None:
    """Whatever the layout of the batch, with experts divided, activations computed again and ranks left idle."""
    model = {"path": str(write_tiny_moe_model(tmp_path)), "router_aux_loss": 0.7}
    fsdp = on(2, expert=2, activation_checkpointing=True)
    ranks, local = (
        load_config(run_of(backend) | {"model": model}) for backend in (fsdp, {"name": "local", "device": "cpu"})
    )
    with opened(ranks) as (many, layout), opened(local) as (one, _):
        for name in ("packed", "padded"):
            batch, objective = minibatch(name, layout)
            assert_gradients_close(many.gradients(batch, objective), one.gradients(batch, objective), 1e-5)
        batch, objective = minibatch("packed", layout, lengths=(9,))
        assert_gradients_close(many.gradients(batch, objective), one.gradients(batch, objective), 1e-5)
        batch, objective = minibatch("packed", layout)
        found, expected = many.update(batch, objective), one.update(batch, objective)
    for metric in ("moe/aux_loss", "moe/imbalance", "loss", "grad_norm"):
        assert found[metric] == pytest.approx(expected[metric], rel=1e-5), metric
