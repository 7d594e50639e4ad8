"""When and where processes first ask for a GPU: after they got one, and none of our modules while it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from spurline.protocols.ranks import RankRequest
from spurline_concurrency import child
from spurline_models import machine
from spurline_ranks import devices
from spurline_ranks.group import TimeLimits, open_ranks

pytestmark = pytest.mark.processes

FORKS = ("spurline_concurrency.worker_processes", "spurline_agents.supervisor")
"""Modules of processes that fork. CUDA does not work in a fork of a process that has used it."""
BEFORE_WORKERS = ("spurline_ranks.rank_main", "spurline_ranks.machine_actor")
WORKERS = (
    "spurline_fsdp_backend.rank",
    "spurline_megatron_backend.open_rank",
    "spurline_models.adapters.lora",
    "spurline_rl.engines.in_process.engine",
    "spurline_async_rl.engines.child_process",
    "spurline_async_rl.weights.cuda_ipc",
    "spurline_async_rl.weights.collective",
    *(("spurline_async_rl.engines.vllm.worker_extension",) if find_spec("vllm") else ()),
)
IMPORTS = """
import importlib, json, sys
forks, before, workers = json.loads(sys.argv[1])
for module in (*forks, *before):
    importlib.import_module(module)
early = "torch" in sys.modules
import pretended_gpu
pretended_gpu.pretend()
for module in workers:
    importlib.import_module(module)
print(json.dumps([early, pretended_gpu.asked]))
"""


def test_modules_of_ours_ask_for_no_gpu_while_they_are_imported() -> None:
    command = [sys.executable, "-c", IMPORTS, json.dumps([FORKS, BEFORE_WORKERS, WORKERS])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    early, asked = json.loads(done.stdout.splitlines()[-1])
    assert not early, "processes that fork, or that have no GPU yet, import no torch"
    assert [file for file, _ in asked if "spurline" in file] == []


def test_each_rank_has_its_gpu_before_a_library_can_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the controller has used CUDA: ranks are no forks of a process that has imported torch."""
    # Elsewhere ranks of tests are forks, which save imports.
    monkeypatch.setattr(child, "subprocess", subprocess)
    for module in (machine, devices):
        monkeypatch.setattr(module, "visible_gpus", lambda: ("4", "7"))
    request = RankRequest(2, device="cuda")
    ranks = open_ranks(request, "pretended_gpu:Worker", (), TimeLimits(120.0, 60.0, 60.0))
    try:
        first, second = ranks.call("asked")
    finally:
        ranks.close()
    assert len(first) > 1
    assert (set(first), set(second)) == ({"4"}, {"7"})
