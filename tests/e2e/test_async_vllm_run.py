"""Whole runs on real vLLM: with the weights of one process and of ranks, with adapters, and with kills on the way."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from async_runs import assert_every_prompt_ended_once, asynchronous, ranks_of
from every_run import SOAK
from living_processes import living_below
from run_helpers import Config, KillableProcess, at, on_ranks, train
from safetensors.torch import load_file
from torch import Tensor
from vllm_engines import SMALL_VLLM, vllm_models

from spurline import load_config
from spurline_models.export import export_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400), pytest.mark.usefixtures("warm_vllm")]

IN_SOAK = pytest.mark.skipif(not SOAK, reason="starts more engines; SPURLINE_SOAK=1")
RANK = 4


@pytest.fixture
def vllm_config(rl_config: Config, tmp_path: Path) -> Config:
    """Eight steps with one vLLM engine of the tests' model."""
    pytest.importorskip("vllm", reason="make test installs vLLM on machines without a GPU", exc_type=ImportError)
    rl_config |= {"steps": 8, "model": {"path": str(vllm_models(tmp_path, "untied").old)}}
    return asynchronous(
        rl_config,
        max_staleness=2,
        correction="tis",
        max_concurrent_groups=4,
        sampling={"max_new_tokens": 12, "top_p": 0.9, "top_k": 32},
        engine=dict(SMALL_VLLM),
    )


def blocks(pid: int, number: signal.Signals) -> bool:
    """Return whether a process blocks this signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


# Every run kills an engine of `test_vllm_engine.py`, and child engines of runs.
@pytest.mark.parametrize("kills", [False, pytest.param(True, marks=IN_SOAK)])
def test_a_run_trains_on_tokens_of_the_right_weights_also_after_its_engine_was_killed(
    vllm_config: Config, kills: bool
) -> None:
    killed: list[int] = []

    def kill() -> None:
        for process in living_below(os.getpid(), "VLLM") if kills else ():
            # Ctrl-C in a terminal must leave the engine to the run, which finishes its step.
            assert blocks(process.pid, signal.SIGINT)
            killed.append(process.pid)
            process.send_signal(signal.SIGKILL)

    lines = train(vllm_config, on_weights_synced=at(3, kill)).lines
    assert bool(killed) == kills, "no engine process was found"
    assert_every_prompt_ended_once(vllm_config)
    assert lines[0]["staleness/max"] == 0
    assert max(line["staleness/max"] for line in lines) <= 2
    # vLLM computes what the trainer computes, so its tokens come from the weights that are trained.
    assert all(line["mismatch/logprob_diff/max"] < 1e-4 for line in lines if line["staleness/max"] == 0)
    assert living_below(os.getpid(), "VLLM") == []


@IN_SOAK
@pytest.mark.processes
@pytest.mark.parametrize("backend", [{"backend": "fsdp"}, {"backend": "megatron", "tensor": 2}])
def test_vllm_generates_with_the_weights_that_ranks_have_trained(vllm_config: Config, backend: dict[str, Any]) -> None:
    vllm_config["source"]["max_staleness"] = 0
    config = on_ranks(vllm_config, **backend)
    lines = train(config).lines
    assert_every_prompt_ended_once(config)
    assert all(line["sync/bytes"] > 0 for line in lines[:-1])
    assert [line["staleness/max"] for line in lines] == [0] * 8
    assert all(line["mismatch/logprob_diff/max"] < 1e-4 for line in lines)
    assert ranks_of(os.getpid()) == []


@IN_SOAK
def test_a_controller_that_is_killed_leaves_no_engine_and_loses_no_prompt(
    vllm_config: Config, killable_process: Callable[..., KillableProcess]
) -> None:
    vllm_config |= {"steps": 60, "checkpoint": {"every_steps": 2}, "report": {"enabled": False}}
    for _ in range(2):
        controller = killable_process(vllm_config)
        controller.wait_for_steps(3)
        engines = living_below(controller.pid, "VLLM")
        assert engines
        controller.kill()
        _, alive = psutil.wait_procs(engines, timeout=60)
        assert not alive, "engines outlived their controller"
    assert train(vllm_config).status == "finished"
    assert_every_prompt_ended_once(vllm_config)


@IN_SOAK
@pytest.mark.processes
def test_adapters_alone_train_what_whole_weights_train(
    vllm_config: Config, tmp_path: Path, spurline_chat_file: Path
) -> None:
    # Each of three synchronous steps moves the adapters far.
    vllm_config["model"] = {"path": str(vllm_models(tmp_path, "tied").old)}
    vllm_config["backend"] |= {"lora": {"rank": RANK, "alpha": 9.0}}
    vllm_config["data"]["eval"] = str(spurline_chat_file)
    vllm_config |= {"steps": 3, "optimizer": {"learning_rate": 3e-2}, "evaluation": {"every_steps": 1}}
    vllm_config["source"] |= {"max_staleness": 0, "held_out": {"max_prompts": 3, "success": {"reward": "early"}}}

    def trained(adapters: bool) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
        """What a run has recorded, and its weights with the adapters merged."""
        sync = {"name": "shared_memory", "adapters": adapters}
        run = train(vllm_config, name=f"adapters-{adapters}", source=vllm_config["source"] | {"weight_sync": sync})
        assert_every_prompt_ended_once(vllm_config | {"run_dir": str(run.run_dir)})
        export_run(load_config(vllm_config | {"run_dir": str(run.run_dir)}), run.run_dir / "exported")
        return run.lines, load_file(run.run_dir / "exported" / "model.safetensors")

    (alone, weights), (merged, others) = trained(True), trained(False)
    # Two layers of seven linear modules, of 32 to 64 numbers in and out, heads of 64.
    inner, queries, keys = 64, 4 * 64, 2 * 64
    sizes = [(32, queries), (32, keys), (32, keys), (queries, 32), (32, inner), (32, inner), (inner, 32)]
    adapter_bytes = 4 * RANK * 2 * sum(map(sum, sizes))
    # After the last step nothing is published.
    sent, sent_merged = ([line["sync/bytes"] for line in lines[:-1]] for lines in (alone, merged))
    assert sent == [adapter_bytes] * 2
    assert min(sent_merged) > adapter_bytes
    for line in (*alone, *merged):
        assert line["staleness/max"] == 0
        # vLLM samples from the weights that are trained, which defines a synchronous run.
        assert line["mismatch/logprob_diff/max"] < 1e-4
    for one, other in zip(alone, merged, strict=True):
        for name in ("loss", "grad_norm", "reward/mean", "loss_tokens"):
            assert one[name] == pytest.approx(other[name], abs=1e-4), name
    assert max((weights[name] - others[name]).abs().max().item() for name in others) <= 1e-4
