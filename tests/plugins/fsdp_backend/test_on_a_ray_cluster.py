"""The FSDP backend on a Ray cluster of two machines: it trains as on one, and leaves engines GPUs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import CPUS, two_machines

from spurline.config.loading import load_config
from spurline.errors import ConfigError
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_models import machine
from spurline_rl.testing.backend_cases import minibatch, weights_of, without_times
from spurline_rl.testing.backend_runs import backend_run, opened

pytest.importorskip("ray")

LAYOUT = ParallelLayout(data=1)
"""Batches of all layouts are the same ones."""


@contextmanager
def backend_of(model: Path, run_dir: Path, **settings: Any) -> Iterator[Backend]:
    section = {"name": "fsdp", "device": "cpu", "ranks": 2, "num_threads": 1, **settings}
    run = backend_run(model, section, ("fsdp_backend",))
    with opened(replace(run, config=run.config.model_copy(update={"run_dir": run_dir}))) as (backend, _):
        yield backend


@pytest.mark.processes
def test_ranks_of_two_machines_train_bit_for_bit_as_those_of_one_process_and_continue_each_other(
    spurline_tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", two_machines().address)
    run_dir = tmp_path / "run"
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir(), there.mkdir()
    with (
        backend_of(spurline_tiny_model, run_dir) as local,
        backend_of(spurline_tiny_model, run_dir, launch="ray", ranks_per_node=1) as spread,
    ):
        first = minibatch("packed", LAYOUT, 0)
        expected = dict(local.gradients(*first))
        for name, gradient in spread.gradients(*first):
            assert gradient.equal(expected.pop(name)), name
        assert not expected
        assert without_times(spread.update(*first)) == without_times(local.update(*first))
        digests, other_digests = spread.save(there), local.save(here)
        assert digests == other_digests
        spread.update(*minibatch("packed", LAYOUT, 1))
        local.load(there, digests)
        spread.load(here, other_digests)
        second = minibatch("packed", LAYOUT, 2)
        assert without_times(spread.update(*second)) == without_times(local.update(*second))
        ours = weights_of(local)
        assert all(value.equal(ours[name]) for name, value in weights_of(spread).items())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"launch": "ray", "device": "cuda"}, "ranks is needed with launch: ray"),
        ({"launch": "ray", "ranks": CPUS}, "device is auto, which looks at this machine, and this machine has no GPU"),
        ({"device": "cpu", "runtime_env": {"env_vars": {"A": "b"}}}, "runtime_env is not .* in the section `cluster`"),
    ],
)
def test_settings_that_a_cluster_cannot_guess_are_asked_for(
    settings: dict[str, Any], problem: str, spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "visible_gpus", tuple)
    with pytest.raises(ConfigError, match=problem):
        backend_run(spurline_tiny_model, {"name": "fsdp", **settings}, ("fsdp_backend",))


@pytest.mark.parametrize(
    ("engine", "launch", "problem"),
    [
        ({"name": "vllm"}, "ray", r"engine\.placement is local.*Set placement: ray"),
        ({"name": "vllm", "placement": "ray"}, "local", r"engine\.placement is ray.*Set placement: local"),
        ({"name": "child_process", "device": "cuda"}, "ray", r"engine\.device is cuda"),
        ({"name": "vllm", "placement": "ray"}, "ray", None),
        ({"name": "child_process", "device": "cpu"}, "ray", None),
    ],
)
def test_engines_and_ranks_that_would_not_know_of_each_other_s_gpus_are_refused(
    engine: dict[str, Any], launch: str, problem: str | None, spurline_tiny_model: Path, tmp_path: Path
) -> None:
    config = {
        "plugins": ["async_rl", "fsdp_backend"],
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": "unused.jsonl"},
        "steps": 2,
        "source": {
            "name": "async_rollouts",
            "environment": {"name": "single_turn", "rewards": {"right": {"name": "exact_match"}}},
            "engine": engine,
            "max_staleness": 0,
        },
        "backend": {"name": "fsdp", "device": "cuda", "ranks": 8, "launch": launch},
        "run_dir": str(tmp_path / "run"),
    }
    if problem is None:
        load_config(config)
    else:
        with pytest.raises(ConfigError, match=problem):
            load_config(config)
