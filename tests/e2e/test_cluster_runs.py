"""Whole runs on a Ray cluster: placed by one section of the config, and started by the SLURM script of the docs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
from every_run import SOAK
from listening import free_port
from ray_clusters import GPUS, add_machine, two_machines
from run_helpers import num_lines, read_metrics, train_command, wait_for
from vllm_engines import vllm_models

pytest.importorskip("ray")
pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
from spurline_models.testing.inputs import write_tiny_model
from spurline_ranks.group import ClusterRequest
from spurline_ranks.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SOAK, reason="starts clusters, for minutes; SPURLINE_SOAK=1"),
    pytest.mark.processes,
    pytest.mark.timeout(2400),
]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

SRUN = f"""#!{sys.executable}
import signal, subprocess, sys
words, tasks = sys.argv[1:], 1
while words[0].startswith("-"):
    word = words.pop(0)
    if word.startswith("--ntasks="):
        tasks = int(word.partition("=")[2])
    if word in ("-w", "--exclude"):
        words.pop(0)
children = [subprocess.Popen(words) for _ in range(tasks)]
signal.signal(signal.SIGTERM, lambda number, _: [child.send_signal(number) for child in children])
sys.exit(max(child.wait() for child in children))
"""
"""Runs a command here, as often as there are tasks, and passes SIGTERM on, as SLURM's does."""


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


def test_the_slurm_script_trains_on_its_cluster_and_saves_when_its_time_is_over(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    _write_tool(tools / "srun", SRUN)
    _write_tool(tools / "scontrol", "#!/bin/sh\necho node1\necho node2\n")
    _write_tool(tools / "spurline", f'#!/bin/sh\nexec {sys.executable} -m spurline.cli "$@"\n')
    _write_tool(tools / "ray", f'#!/bin/sh\nexec {sys.executable} -m ray.scripts.scripts "$@"\n')
    run_dir, config, model = tmp_path / "run", tmp_path / "run.yaml", write_tiny_model(tmp_path / "model", seed=0)
    config.write_text(
        f"plugins: [fsdp_backend]\nrun_dir: {run_dir}\nmodel: {{path: {model}}}\n"
        f"data: {{train: {ROOT / 'examples' / 'data' / 'sort_train.jsonl'}}}\nsteps: 100000\n"
        "backend: {name: fsdp, device: cpu, ranks: 2, ranks_per_node: 1, num_threads: 1}\n"
    )
    script = tmp_path / "train.sh"
    # The path of a socket has 107 bytes at most.
    folder = Path(tempfile.mkdtemp())
    script.write_text(_script(free_port(), folder, config))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_ADDRESS")}
    environment |= {
        "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(place for place in sys.path if place),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        # It would start a process for each CPU.
        "RAY_prestart_worker_first_driver": "0",
    }
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(["bash", script], stdout=log, stderr=log, env=environment, start_new_session=True)
    family: list[psutil.Process] = []
    try:
        wait_for(
            lambda: num_lines(run_dir / "metrics.jsonl") > 2 or job.poll() is not None,
            "the third step",
            900,
            every_s=0.5,
        )
        assert job.poll() is None, (tmp_path / "log").read_text()
        family = psutil.Process(job.pid).children(recursive=True)
        # SLURM tells the script alone, by --signal=B:TERM.
        job.send_signal(signal.SIGTERM)
        job.wait(300)
    finally:
        for process in [*family, *([psutil.Process(job.pid)] if job.poll() is None else [])]:
            if job.poll() is None and process.is_running():
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
    done = read_metrics(run_dir)[-1]["step"]
    said = (tmp_path / "log").read_text()
    assert (run_dir / "checkpoints" / f"step-{done:08d}").is_dir(), said
    assert sorted(path.name for path in (run_dir / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    wait_for(lambda: not [each for each in family if each.is_running()], f"the end of {family}", 90, every_s=0.5)


def _script(port: int, folder: Path, config: Path) -> str:
    """That of the page, for a port, a folder of Ray's and a config of this test's."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    found = re.search(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    assert found is not None
    script = found[1].replace("=64", "=4").replace("6379", str(port)).replace(" run.yaml ", f" {config} ")
    head = f"--head --include-dashboard=false --temp-dir={folder}"
    return script.replace("source /shared/venv/bin/activate\n", "").replace("--head", head)


def _write_tool(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
