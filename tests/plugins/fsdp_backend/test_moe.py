"""Models with experts: what they need to be divided, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fsdp_layouts import on

from spurline import load_config
from spurline.errors import ConfigError, ModelError
from spurline.testing import write_tiny_moe_model
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
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_starts(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(run_of({"name": "fsdp", "device": "cpu", **settings}))


@pytest.mark.processes
def test_a_model_without_experts_is_refused_with_the_way_out(spurline_tiny_model: Path) -> None:
    run = backend_run(spurline_tiny_model, on(2, expert=2), ("fsdp_backend",))
    with pytest.raises(ModelError, match=r"no experts to divide in .* Qwen3ForCausalLM. Set it to 1"), opened(run):
        pass


@pytest.mark.processes
def test_experts_that_ranks_cannot_share_equally_are_refused_with_the_numbers_that_do(tmp_path: Path) -> None:
    run = backend_run(write_tiny_moe_model(tmp_path, num_experts=3), on(2, expert=2), ("fsdp_backend",))
    with pytest.raises(ModelError, match=r"does not divide the 3 experts .* Numbers that do: 1, 3"), opened(run):
        pass
