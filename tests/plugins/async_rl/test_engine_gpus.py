"""Engines get the GPUs that the backend's ranks leave."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spurline.errors import ConfigError
from spurline.protocols.ranks import Launch, RankRequest
from spurline.protocols.source import SourceFacts
from spurline_async_rl.engines.child_process import ChildMember
from spurline_async_rl.engines.configs import ChildProcessEngineConfig, VllmEngineConfig
from spurline_async_rl.engines.gpus import VISIBLE, own_gpus, shared_gpu
from spurline_async_rl.engines.vllm.launch import engine_environment
from spurline_ranks import devices


@pytest.fixture(autouse=True)
def six_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that names its GPUs 10 to 15."""
    monkeypatch.setattr(devices, "visible_gpus", lambda: tuple(str(number) for number in range(10, 16)))


def run_with(
    count: int,
    gpus: tuple[int, ...] | None = None,
    *,
    device: Any = "cuda",
    launch: Launch = "local",
    sync: str = "",
    colocated: bool = False,
) -> Any:
    request = RankRequest(count, device, launch, gpus=gpus)
    backend = SimpleNamespace(name="many", rank_request=lambda: request)
    facts = SourceFacts(without_critic=None, transport=sync or None, has_colocated_engines=colocated)
    return SimpleNamespace(backend=backend, source=SimpleNamespace(facts=facts), run_dir=Path("runs"))


def test_each_engine_has_gpus_that_no_rank_and_no_other_engine_has() -> None:
    run = run_with(2)
    assert [own_gpus(run, number, 2, 2) for number in range(2)] == ["12,13", "14,15"]
    assert [own_gpus(run_with(2, (3, 5)), number, 4, 1) for number in range(4)] == ["10", "11", "12", "14"]
    assert [shared_gpu(run, number) for number in range(6)] == ["12", "13", "14", "15", "12", "13"]


@pytest.mark.parametrize("run", [run_with(2, device="cpu"), run_with(2, launch="ray")])
def test_where_no_rank_has_a_gpu_here_engines_see_what_this_process_sees(run: Any) -> None:
    assert own_gpus(run, 0, 9, 1) is None
    assert shared_gpu(run, 0) is None


def test_too_few_gpus_beside_the_ranks_are_an_error_that_says_how_many_are_left() -> None:
    with pytest.raises(ConfigError, match=r"engine\.engines is 2, each on 2 GPUs, but backend 'many' leaves 3 on"):
        own_gpus(run_with(3), 0, 2, 2)
    assert shared_gpu(run_with(6), 0) == ""


def test_engines_that_get_handles_of_memory_are_on_the_gpus_of_the_ranks() -> None:
    run = run_with(4, (4, 1, 0, 5), sync="cuda_ipc")
    assert own_gpus(run, 0, 1, 1) == "14"
    assert [own_gpus(run, number, 4, 1) for number in range(4)] == ["14", "11", "10", "15"]
    assert [own_gpus(run, number, 2, 2) for number in range(2)] == ["14,11", "10,15"]
    with pytest.raises(ConfigError, match=r"engine\.engines is 5, each on 1 GPU, but backend 'many' has 4 on"):
        own_gpus(run, 0, 5, 1)


@pytest.mark.parametrize(
    ("engine", "launch", "sync", "key"),
    [
        (VllmEngineConfig(engines=3), "local", "cuda_ipc", "engines"),
        (VllmEngineConfig(engines=2, tensor_parallel_size=2), "local", "cuda_ipc", "engines"),
        (VllmEngineConfig(placement="ray"), "ray", "cuda_ipc", "placement"),
        (ChildProcessEngineConfig(device="cpu"), "local", "collective", "device"),
    ],
)
def test_a_transport_that_cannot_reach_the_engines_is_a_problem_of_the_config(
    engine: Any, launch: Launch, sync: str, key: str
) -> None:
    assert [problem.key for problem in engine.problems(run_with(2, launch=launch, sync=sync))] == [key]
    assert list(engine.problems(run_with(2, launch=launch))) == []


def test_what_is_chosen_is_what_an_engine_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "10,11,12")
    with engine_environment(VllmEngineConfig(), "12"):
        assert os.environ[VISIBLE] == "12"
    assert os.environ[VISIBLE] == "10,11,12"
    member = ChildMember(1, ChildProcessEngineConfig(num_threads=3), run_with(4))
    assert member._environment == {"OMP_NUM_THREADS": "3", VISIBLE: "15"}
    assert VISIBLE not in ChildMember(1, ChildProcessEngineConfig(), run_with(4, device="cpu"))._environment
