"""Frozen parts beside trained ones in the same groups of shards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_layouts import on

from spurline.config.loading import LoadedConfig
from spurline_fsdp_backend.checkpoint import read_weights
from spurline_rl.testing.backend_cases import assert_gradients_close, minibatch, weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

FROZEN = ("*embed_tokens*", "model.layers.0.*", "*norm*", "*up_proj*")
"""A whole layer and what is before it, and parts of the other one."""


def frozen_run(model: Path, settings: dict[str, Any]) -> LoadedConfig:
    loaded = backend_run(model, settings, ("fsdp_backend",))
    section = loaded.config.model.model_copy(update={"freeze": FROZEN})
    return replace(loaded, config=loaded.config.model_copy(update={"model": section}))


@pytest.mark.processes
def test_frozen_parts_of_shards_are_those_of_one_process(spurline_tiny_model: Path, tmp_path: Path) -> None:
    with (
        opened(frozen_run(spurline_tiny_model, on(2))) as (backend, layout),
        opened(frozen_run(spurline_tiny_model, {"name": "models/local", "device": "cpu"})) as (local, _),
    ):
        assert {**backend.facts(), "device": ""} == {**local.facts(), "device": ""}
        initial = weights_of(backend)
        for step in range(2):
            batch, objective = minibatch("padded", layout, step)
            found, expected = (one.update(batch, objective) for one in (backend, local))
            for name in ("loss", "grad_norm"):
                assert found[name] == pytest.approx(expected[name], rel=1e-5), (step, name)
        assert_gradients_close(backend.gradients(batch, objective), local.gradients(batch, objective), 1e-5)
        changed = {name for name, value in weights_of(backend).items() if not torch.equal(value, initial[name])}
        assert changed == {name for name, _ in local.gradients(batch, objective)}
        backend.save(tmp_path)
        backend.update(batch, objective)
        expected_weights = weights_of(backend)
        backend.load(tmp_path)
        backend.update(batch, objective)
        assert all(torch.equal(value, expected_weights[name]) for name, value in weights_of(backend).items())
        run = frozen_run(spurline_tiny_model, on(2)).config
        read = dict(read_weights(run, tmp_path, {}).tensors)
        backend.load(tmp_path)
        assert all(torch.equal(value, read[name]) for name, value in weights_of(backend).items())
