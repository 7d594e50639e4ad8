"""A whole run placed on a Ray cluster of three machines by one section of its config: FSDP ranks and a vLLM engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray_clusters import GPUS, add_machine, two_machines
from run_helpers import read_metrics, train_command, wait_for
from vllm_engines import vllm_models

pytest.importorskip("ray")
pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
from spurline_ranks.group import ClusterRequest
from spurline_ranks.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="takes five minutes; SPURLINE_SOAK=1"),
    pytest.mark.processes,
    pytest.mark.timeout(2400),
]
EXAMPLES = Path(__file__).parents[2] / "examples"


# Writes the module of the reward, which even a model that has learned nothing gets unlike values of.
@pytest.mark.usefixtures("rl_config")
def test_the_example_of_rl_with_vllm_runs_on_a_cluster_from_its_first_step_to_its_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = two_machines()
    third = add_machine(cluster)
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    run_dir = tmp_path / "run"
    settings: dict[str, Any] = {
        "plugins": ["collation_fast", "async_rl", "fsdp_backend"],
        "run_dir": str(run_dir),
        "model.path": str(vllm_models(tmp_path, "untied").old),
        "data.train": str(EXAMPLES / "data" / "sort_train.jsonl"),
        "data.eval": str(EXAMPLES / "data" / "sort_eval.jsonl"),
        "steps": 3,
        # Every answer is by the newest weights, so that the trainer's logprobs are the engine's.
        "source.max_staleness": 0,
        "source.environment.rewards": f"{tmp_path}/modules/run_rewards.py:early_letters",
        "evaluation.every_steps": None,
        "checkpoint.every_steps": None,
        "source.held_out.max_prompts": 8,
        "source.prompts_per_step": 8,
        "source.samples_per_prompt": 4,
        "source.engine.kv_cache_gb": 0.25,
        "source.engine.cpu_threads": 1,
        "minibatches.prompts_per_minibatch": 4,
        # What a machine here calls GPUs are none: the ranks are on CPU, the engine's place has one all the same.
        "backend": {"name": "fsdp", "device": "cpu", "ranks": 2, "ranks_per_node": 1, "num_threads": 1},
        "cluster.address": cluster.address,
    }
    overrides = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    del environment["RAY_ADDRESS"]
    try:
        command = [*train_command(EXAMPLES / "rl_sort_vllm.yaml"), *overrides]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1800, check=False)
        assert ended.returncode == 0, f"{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}"
        print(ended.stdout[-3000:])
        lines = read_metrics(run_dir)
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert min(line["grad_norm"] for line in lines) > 0, "each publish has other weights"
        assert max(line["mismatch/logprob_diff/max"] for line in lines) < 1e-4, "the engine had the trainer's weights"
        logs = {path.name: path.read_text() for path in (run_dir / "logs").iterdir()}
        assert sorted(logs) == ["engine-0.log", "rank-0.log", "rank-1.log"]
        pids = [int(text.split("The output of process ")[1].split()[0]) for text in logs.values()]
        wait_for(lambda: not any(map(psutil.pid_exists, pids)), "the end of all actors", 30)
        joined = RayCluster(ClusterRequest())
        joined.open()
        try:
            wait_for(lambda: sum(node.free.get("GPU", 0.0) for node in joined.nodes()) == 3 * GPUS, "all GPUs", 60)
        finally:
            joined.close()
    finally:
        cluster.remove_node(third)
