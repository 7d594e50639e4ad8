"""Settings that nobody wrote are right on a GPU: precision, the engine's GPU and share of it, and the transport."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from backend_batches import run_config, write_model_folder

from spurline import load_config
from spurline.config.run_config import ModelConfig, RunConfig
from spurline.errors import CheckpointError, ConfigError
from spurline.plugins.host import PluginHost
from spurline.run.checkpoints.checkpoint import CheckpointStore
from spurline.run.checkpoints.resume import Resume, ResumeRequest, find_resume
from spurline.run.directory import RunDirectory
from spurline.trackers.start_lines import banner
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.gpus import own_gpus, shared_gpu
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.vllm.launch import (
    EngineSpec,
    EngineStart,
    engine_arguments,
    engine_environment,
    engine_spec,
)
from spurline_async_rl.source.publishing import choose_sync
from spurline_models import machine
from spurline_models.local.backend import LocalBackend
from spurline_models.local.configs import LocalBackendConfig
from spurline_planning.plan import summarize_plan
from spurline_ranks import devices

GIB = 1 << 30
PLUGINS = ["fsdp_backend", "megatron_backend", "async_rl"]
BACKENDS = [{"name": "local"}, {"name": "fsdp", "ranks": 2}, {"name": "megatron", "ranks": 2}]
See = Callable[[int], None]


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> See:
    """Makes the machine show this number of GPUs."""

    def pretend(number: int) -> None:
        for module in (machine, devices):
            monkeypatch.setattr(module, "visible_gpus", lambda: tuple(map(str, range(number))))

    return pretend


def settings(**sections: Any) -> dict[str, Any]:
    source = {"name": "async_rollouts", "max_staleness": 0, "environment": {"rewards": "exact_match"}}
    engine = {"name": "child_process"} | sections.pop("engine", {})
    base = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 9, "plugins": PLUGINS}
    return {**base, "source": {**source, "engine": engine}, **sections}


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend["name"])
def test_precision_is_bf16_on_gpus_and_fp32_on_a_cpu_and_the_first_lines_say_so(
    see: See, backend: dict[str, Any]
) -> None:
    for gpus, words in ((8, "cuda, bf16 (auto)"), (0, "cpu, fp32 (auto)")):
        see(gpus)
        loaded = load_config(settings(backend=backend))
        precision = words.split()[1]
        assert loaded.config.backend.facts.computes_in == precision
        assert any(words in line for line in banner(loaded))
        assert words in summarize_plan(loaded, None, None)
        # The engine's copy of the model computes as the trainer, so that rollouts are on policy.
        assert loaded.settled({}).config.source.engine.precision == precision
    see(8)
    assert load_config(settings(backend={**backend, "precision": "fp32"})).config.backend.facts.computes_in == "fp32"


@pytest.mark.parametrize("setting", ["weights", "fp8"])
def test_what_needs_bf16_needs_no_precision_on_a_gpu(see: See, setting: str) -> None:
    needs = {"weights": {"weights": "bf16_masters"}, "fp8": {"fp8": True}}[setting]
    see(1)
    assert load_config(settings(backend={"name": "local", **needs})).config.backend.facts.computes_in == "bf16"
    # A config is checked as if there was a GPU, since it may be meant for another machine. A run on this one ends.
    see(0)
    config = load_config(settings(backend={"name": "local", **needs})).config.backend
    assert [problem.key for problem in config.problems_on("cpu")][:1] == [setting]


def test_the_estimate_of_auto_is_that_of_the_precision_it_means(see: See, tmp_path: Path) -> None:
    run = run_config(write_model_folder(tmp_path / "model"))
    for gpus, precision in ((1, "bf16"), (0, "fp32")):
        see(gpus)
        auto, explicit = LocalBackendConfig(), LocalBackendConfig(precision=precision)
        assert auto.estimate_memory(run, 64, 512) == explicit.estimate_memory(run, 64, 512)
        assert list(auto.savings(run, 64, 512)) == list(explicit.savings(run, 64, 512))


def test_a_gpu_that_torch_cannot_use_is_an_error_and_no_slow_run(see: See, tmp_path: Path) -> None:
    see(1)
    run = run_config(write_model_folder(tmp_path / "model"))
    with pytest.raises(ConfigError, match=r"backend\.device needs a GPU, but torch sees none.*device: cpu"):
        LocalBackend(LocalBackendConfig(), run, PluginHost.load([]).registry, 9)
    assert "torch sees no GPU here" in str(LocalBackendConfig().missing_here())


Continue = Callable[..., Resume]


@pytest.fixture
def continue_run(tmp_path: Path) -> Continue:
    """Returns the resume of a run from a checkpoint whose config was recorded with `recorded` in it."""

    def resume(backend: dict[str, Any], recorded: dict[str, Any], allowed: tuple[str, ...] = ()) -> Resume:
        config = load_config(settings(backend=backend, run_dir=str(tmp_path)))
        before = json.loads(json.dumps(config.resolved()))
        before["backend"] |= recorded["backend"]
        before["source"]["engine"] |= recorded["engine"]
        facts = {"config": before, "versions": {}, "updates": {}, "history": []}
        CheckpointStore(tmp_path / "checkpoints").save(4, lambda folder: None, facts)
        return find_resume(RunDirectory(tmp_path), config, ResumeRequest("auto", allowed))

    return resume


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend["name"])
@pytest.mark.parametrize(("gpus", "recorded"), [(0, "bf16"), (8, "fp32"), (8, "bf16"), (0, "fp32")])
def test_a_resumed_run_keeps_its_precision_on_another_machine(
    see: See, continue_run: Continue, backend: dict[str, Any], gpus: int, recorded: str
) -> None:
    see(gpus)
    resume = continue_run(backend, {"backend": {"precision": recorded}, "engine": {"precision": recorded}})
    config = resume.loaded.config
    assert [config.backend.facts.computes_in, config.source.engine.precision] == [recorded, recorded]
    assert resume.history == ()
    said = [note for note in resume.notes if note.startswith("backend.precision stays")]
    assert bool(said) == (recorded != ("bf16" if gpus else "fp32"))
    # What the checkpoints of this process record is what was kept.
    assert resume.loaded.resolved()["backend"]["precision"] == recorded
    other = {"fp32": "bf16", "bf16": "fp32"}[recorded]
    with pytest.raises(CheckpointError, match=r"backend\.precision"):
        continue_run({**backend, "precision": other}, {"backend": {"precision": recorded}, "engine": {}})


def test_auto_that_an_earlier_version_recorded_is_this_machines(see: See, continue_run: Continue) -> None:
    see(8)
    resume = continue_run({"name": "fsdp"}, {"backend": {"precision": "auto"}, "engine": {"precision": "fp32"}})
    assert resume.loaded.config.backend.facts.computes_in == "bf16"
    assert resume.history == ()


def engine_on(
    see: See, gpus: int, sync: str | None, engine: dict[str, Any], device: str = "auto"
) -> tuple[RunConfig, VllmEngineConfig]:
    see(gpus)
    config = settings(engine={"name": "vllm", **engine}, backend={"name": "local", "device": device})
    config["source"] |= {"weight_sync": sync} if sync else {}
    run = load_config(config).config
    return run, run.source.engine


@pytest.mark.parametrize(
    ("gpus", "engine", "sync", "seen"),
    [
        (1, {}, None, ["0"]),
        (1, {"engines": 2}, None, ["0", "0"]),
        (2, {}, None, ["1"]),
        (4, {"engines": 3}, None, ["1", "2", "3"]),
        (5, {"engines": 2, "tensor_parallel_size": 2}, None, ["1,2", "3,4"]),
        (4, {"placement": "colocated"}, None, ["0"]),
        (4, {}, "cuda_ipc", ["0"]),
    ],
)
def test_engines_get_the_gpus_that_a_trainer_in_this_process_leaves(
    see: See, gpus: int, engine: dict[str, Any], sync: str | None, seen: list[str]
) -> None:
    run, config = engine_on(see, gpus, sync, engine)
    each = config.tensor_parallel_size
    assert [own_gpus(run, number, config.engines, each) for number in range(config.engines)] == seen
    assert shared_gpu(run, 0) == seen[0].split(",")[0]
    with pytest.raises(ConfigError, match=r"engines is 9, each on 2 GPUs, but backend 'local' (has|leaves) \d on"):
        own_gpus(run, 0, 9, 2)


@pytest.mark.parametrize(
    ("gpus", "engine", "device", "first"),
    [
        (1, {}, "auto", "cuda_ipc"),
        (1, {"placement": "colocated"}, "auto", "cuda_ipc"),
        (4, {"placement": "colocated"}, "auto", "cuda_ipc"),
        (2, {}, "auto", "collective"),
        (1, {}, "cpu", "collective"),
        (0, {}, "auto", "collective"),
    ],
)
def test_weights_stay_on_a_gpu_that_trainer_and_engine_share(
    see: See, gpus: int, engine: dict[str, Any], device: str, first: str
) -> None:
    pytest.importorskip("vllm")
    from spurline_async_rl.engines.vllm.engine import VllmEngine

    run, config = engine_on(see, gpus, None, engine, device)
    tokenizer: Any = None
    made, registry = VllmEngine(config, run, tokenizer), load_config(settings()).host.registry
    assert choose_sync(None, made, registry, gpus > 0 and device == "auto").transport == first
    # NCCL cannot form a group of two processes on one GPU.
    assert (made.transports[-1] == "collective") == (own_gpus(run, 0, 1, 1) == "0")


def test_engine_and_trainer_fit_a_gpu_together(see: See, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM ends if less than its share is free when it starts, and the trainer needs the rest later."""
    folder = write_model_folder(tmp_path / "model", vocab_size=1 << 18, hidden_size=1 << 10, tie_word_embeddings=True)
    for gib in (12, 24, 80):
        monkeypatch.setattr(LocalBackendConfig, "device_bytes", lambda self, gib=gib: gib * GIB)
        shares: dict[str, float] = {}
        for name, gpus, engine in (
            ("beside", 1, {}),
            ("two beside", 1, {"engines": 2}),
            ("by turns", 1, {"placement": "colocated"}),
            ("alone by turns", 1, {"placement": "colocated", "offload_trainer": True}),
            ("alone", 2, {}),
            ("as written", 1, {"gpu_memory_utilization": 0.42}),
        ):
            run, config = engine_on(see, gpus, None, engine)
            run = run.model_copy(update={"model": run.model.model_copy(update={"path": str(folder)})})
            # What vLLM gets.
            shares[name] = engine_arguments(engine_spec(config, run), on_cpu=False)["gpu_memory_utilization"]
            [line] = config.describe(run, 8, 64)
            assert f"{shares[name]:.0%} of each" in line
        # One GiB of weights in fp32, their gradients and two moments.
        assert shares["beside"] == pytest.approx((0.9 - 4 / gib) / 2, abs=0.01)
        assert shares["two beside"] == shares["beside"] / 2
        assert shares["by turns"] == pytest.approx(0.9 - 1 / gib, abs=0.01)
        assert [shares["alone by turns"], shares["alone"], shares["as written"]] == [0.9, 0.9, 0.42]
    # Engines get a share that vLLM can start with, however many they are, unless the weights do not fit into it.
    for gib, part in ((8, None), (4, r"leaves an engine 0\.4 GiB .* 0\.5 GiB of weights\. Set placement: colocated")):
        monkeypatch.setattr(LocalBackendConfig, "device_bytes", lambda self, gib=gib: gib * GIB)
        run, config = engine_on(see, 1, None, {"engines": 4})
        run = run.model_copy(update={"model": run.model.model_copy(update={"path": str(folder)})})
        with nullcontext() if part is None else pytest.raises(ConfigError, match=part):
            assert config.gpu_share(run) == 0.1


@pytest.mark.processes
def test_a_gpu_without_room_for_the_engine_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.engine.async_llm import AsyncLLM

    def refuse(arguments: object) -> None:
        raise ValueError("Free memory on device cuda:0 is less than desired GPU memory utilization (0.9, 71.2 GiB).")

    monkeypatch.setattr(AsyncLLM, "from_engine_args", refuse)
    monkeypatch.setattr("vllm.AsyncEngineArgs", dict)
    with pytest.raises(EngineDiedError, match=r"Lower source\.engine\.gpu_memory_utilization.*placement: colocated"):
        EngineStart(EngineSpec(VllmEngineConfig(), ModelConfig(path="m"))).run()


def test_vllm_always_spawns_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from vllm.utils.system_utils import get_mp_context

    monkeypatch.delenv("VLLM_WORKER_MULTIPROC_METHOD", raising=False)
    with engine_environment(VllmEngineConfig()):
        assert get_mp_context().get_start_method() == "spawn"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ


def test_a_backend_takes_no_recorded_value_of_another_backend(see: See) -> None:
    see(1)
    backend = load_config(settings(backend={"name": "local"})).config.backend
    assert backend.settled(None, {"name": "local", "precision": "fp32"}).precision == "fp32"
    assert backend.settled(None, {"name": "fsdp", "precision": "fp32"}).precision == "bf16"
