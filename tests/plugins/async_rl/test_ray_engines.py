"""Engines as actors on a cluster of three machines: where they are, and what becomes of those whose machine is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from backend_batches import run_config
from ray_clusters import GPUS, add_machine, two_machines
from run_helpers import wait_for

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, RunFailedError
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_ranks.cluster import ClusterConfig
from spurline_ranks.group import ClusterRequest
from spurline_rl.protocols.rollout_engine import GenerationResult
from spurline_rl.testing.rollout_engine_contract import request
from spurline_text.tokenizer import load_tokenizer

pytest.importorskip("ray")
pytest.importorskip("vllm")
from ray_engines import ScriptedActor

from spurline_async_rl.engines.vllm import ray as engines_on_ray
from spurline_async_rl.engines.vllm.engine import VllmEngine
from spurline_ranks.ray_cluster import RayCluster

pytestmark = pytest.mark.processes
LIMIT_S = 180.0


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayCluster]:
    """Three machines, of which a test may end one that is not the head; two of them stay."""
    cluster = two_machines()
    add_machine(cluster)
    monkeypatch.setattr(engines_on_ray, "EngineActor", ScriptedActor)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    joined = RayCluster(ClusterRequest())
    joined.open()
    try:
        wait_for(lambda: len(joined.nodes()) == 3, "three machines", 30)
        yield joined
    finally:
        joined.close()
        for machine in list(cluster.worker_nodes)[1:]:
            cluster.remove_node(machine)


@pytest.fixture
def make(spurline_tiny_model: Path, tmp_path: Path) -> Callable[..., VllmEngine]:
    def make(**settings: Any) -> VllmEngine:
        config = VllmEngineConfig(placement="ray", tensor_parallel_size=GPUS, **settings)
        model = ModelConfig(path=str(spurline_tiny_model))
        cluster = ClusterConfig(room_timeout_s=0.0)
        run = run_config(spurline_tiny_model, model=model, run_dir=tmp_path / "run", cluster=cluster)
        return VllmEngine(config, run=run, tokenizer=load_tokenizer(model))

    return make


def test_an_engine_whose_machine_is_lost_is_replaced_on_another_while_the_other_one_goes_on(
    joined: RayCluster, make: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    cluster = two_machines()
    workers = {machine.node_id: machine for machine in cluster.worker_nodes}

    async def main() -> tuple[list[GenerationResult], GenerationResult, list[str], str]:
        engine = make(engines=2)
        try:
            async with asyncio.timeout(LIMIT_S):
                await publish(engine, 1)
                before = names(engine)
                assert len({node_of(name) for name in before}) == 2, "each fills a machine"
                victim = next(name for name in before if any(node.startswith(node_of(name)) for node in workers))
                lost = next(machine for node, machine in workers.items() if node.startswith(node_of(victim)))
                asked = [request([40 + number], seed=number, max_new_tokens=150) for number in range(8)]
                writing = asyncio.gather(*map(engine.generate, asked))
                await engine.generate(request([50], max_new_tokens=10))
                await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
                results = await writing
                while not engine.awaiting_weights:
                    await asyncio.sleep(0.1)
                await publish(engine, 2)
                return results, await engine.generate(request([60])), names(engine), victim
        finally:
            await engine.close()

    results, after, names_after, victim = asyncio.run(main())
    assert [len(result.token_ids) for result in results] == [150] * 8
    assert {int(version) for result in results for version in result.versions} == {1}
    assert set(after.versions.tolist()) == {2}
    assert len({node_of(name) for name in names_after}) == 2
    assert node_of(victim) not in {node_of(name) for name in names_after}
    # Both logs are in the run directory; the replaced one's has what two processes wrote.
    logs = {path.name: path.read_text() for path in (tmp_path / "run" / "logs").iterdir()}
    number = victim.split()[1]
    assert sorted(logs) == ["engine-0.log", "engine-1.log"]
    assert {name: text.count("says that it starts") for name, text in logs.items()} == {
        f"engine-{number}.log": 2,
        f"engine-{1 - int(number)}.log": 1,
    }
    pids = [int(line.split()[4]) for text in logs.values() for line in text.splitlines() if line.startswith("The out")]
    assert len(pids) == 3
    wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the end of all actors", 20)
    wait_for(lambda: all(node.free.get("GPU") == GPUS for node in joined.nodes()), "all GPUs", 30)


def test_engines_that_the_cluster_has_no_room_for_are_refused_before_any_is_started(
    joined: RayCluster, make: Callable[..., VllmEngine], tmp_path: Path
) -> None:
    engine = make(engines=4)

    async def main() -> None:
        try:
            await publish(engine, 1)
        finally:
            await engine.close()

    wants = rf"wants 4 engines with {GPUS} GPU, .* Free are {GPUS} of {GPUS} GPU"
    with pytest.raises((ConfigError, RunFailedError), match=wants):
        asyncio.run(main())
    assert not (tmp_path / "run" / "logs").exists()


async def publish(engine: VllmEngine, version: int) -> None:
    await engine.begin_update(version)
    await engine.finish_update(version)


def names(engine: VllmEngine) -> list[str]:
    """Such as `engine 0 (process 4711 on Ray node 1a2b3c4d)`."""
    return [each.name for each in engine._engines]


def node_of(name: str) -> str:
    """The beginning of the id of an engine's machine."""
    return name.rpartition(" ")[2].removesuffix(")")
