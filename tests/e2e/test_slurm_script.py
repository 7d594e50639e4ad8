"""The SLURM script of "Many machines", with SLURM's own commands replaced: a cluster, a run on it that is told to end,
a checkpoint, and nothing left."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from run_helpers import read_metrics, wait_for

from spurline_models.testing.inputs import write_tiny_model

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("SPURLINE_SOAK"), reason="starts a cluster twice; SPURLINE_SOAK=1"),
    pytest.mark.processes,
    pytest.mark.timeout(1200),
]
ROOT = Path(__file__).parents[2]

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
    script.write_text(_script(_free_port(), folder, config))
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
        wait_for(lambda: _num_steps(run_dir) > 2 or job.poll() is not None, "the third step", 900, every_s=0.5)
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


def _num_steps(run_dir: Path) -> int:
    return len(read_metrics(run_dir)) if (run_dir / "metrics.jsonl").is_file() else 0


def _write_tool(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _free_port() -> int:
    """Below the ports that Ray gives to its workers."""
    for port in range(6400, 6500):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")
