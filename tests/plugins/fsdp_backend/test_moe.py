"""Models with experts: what they need to be divided, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsdp_layouts import on

from spurline import load_config
from spurline.errors import ConfigError, ModelError
from spurline.testing import write_tiny_model, write_tiny_moe_model
from spurline.testing.backend_runs import backend_run, opened


def run_of(backend: dict[str, Any]) -> dict[str, Any]:
    return {
        "plugins": ["fsdp_backend"],
        "model": {"path": "unused"},
        "data": {"train": "unused.jsonl"},
        "steps": 1,
        "backend": backend,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 4, "expert": 3}, "expert is 3, which does not divide the 4 ranks"),
        ({"ranks": 4, "expert": 2, "replicas": 2}, "expert together with replicas"),
        ({"ranks": 2, "expert": 2, "compile": True}, "compile together with expert"),
        ({"ranks": 2, "expert": 2, "lora": {"rank": 4}}, "lora together with expert"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(run_of({"name": "fsdp", "device": "cpu", **settings}))


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "the model has no experts. Set expert to 1"),
        (3, "does not divide the 3 experts of a layer"),
    ],
)
def test_models_whose_experts_ranks_cannot_share_equally_are_refused_before_ranks_start(
    tmp_path: Path, experts: int | None, message: str
) -> None:
    model = write_tiny_model(tmp_path) if experts is None else write_tiny_moe_model(tmp_path, num_experts=experts)
    run = backend_run(model, on(2, expert=2), ("fsdp_backend",))
    with pytest.raises(ConfigError, match=message), opened(run):
        pass


@pytest.mark.processes
def test_experts_that_no_layer_has_are_refused_with_the_way_out(tmp_path: Path) -> None:
    run = backend_run(write_tiny_moe_model(tmp_path, mlp_only_layers=[0, 1]), on(2, expert=2), ("fsdp_backend",))
    with pytest.raises(ModelError, match=r"no experts to divide in .* Qwen3MoeForCausalLM. Set it to 1"), opened(run):
        pass
