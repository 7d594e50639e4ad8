"""What of engine vllm and its transports needs no vLLM: settings, what is asked and kept, files, and refusals."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_batches import run_config
from vllm_engines import disk, vllm_engine

from spurline.config.run_config import ModelConfig
from spurline.errors import BucketLostError, ConfigError, DataError, RunFailedError
from spurline.protocols.source import SourceFacts
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.member import EngineDiedError
from spurline_async_rl.engines.response import Delta, Progress, VllmResponse
from spurline_async_rl.engines.vllm import engine as engine_module
from spurline_async_rl.engines.vllm import launch
from spurline_async_rl.engines.vllm.adapters import EngineAdapter
from spurline_async_rl.engines.vllm.launch import (
    EngineSpec,
    EngineStart,
    check_complete,
    engine_arguments,
    engine_environment,
    engine_spec,
    writing_to,
)
from spurline_async_rl.engines.vllm.worker_extension import WorkerExtension
from spurline_async_rl.weights.collective import CollectiveSync
from spurline_async_rl.weights.configs import CollectiveSyncConfig
from spurline_async_rl.weights.disk import read_file
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.testing.inputs import write_tiny_moe_model
from spurline_ranks.logs import last_words
from spurline_rl.testing.rollout_engine_contract import request
from spurline_text.testing.inputs import tiny_tokenizer

WEIGHTS = [(f"layer.{number}", torch.arange(1000.0) + number) for number in range(30)]
BACKEND: Any = SimpleNamespace(named_weights=lambda: iter(WEIGHTS))


def spec(**settings: Any) -> EngineSpec:
    return EngineSpec(VllmEngineConfig(**settings), ModelConfig(path="some/model"))


def test_automatic_settings_follow_the_machine() -> None:
    on_cpu, on_gpu = (engine_arguments(spec(), on_cpu=cpu) for cpu in (True, False))
    assert [on_cpu["dtype"], on_gpu["dtype"]] == ["float32", "bfloat16"]
    assert [on_cpu["enforce_eager"], on_gpu["enforce_eager"]] == [True, False]
    assert [on_cpu["kv_cache_memory_bytes"], on_gpu["kv_cache_memory_bytes"]] == [4 * 2**30, None]


def test_settings_reach_vllm_and_engine_args_take_precedence() -> None:
    asked = spec(
        kv_cache_gb=0.5, max_model_len=100, tensor_parallel_size=2, engine_args={"max_num_seqs": 3, "block_size": 16}
    )
    arguments = engine_arguments(asked, on_cpu=False)
    assert arguments["kv_cache_memory_bytes"] == 2**29
    assert [arguments[name] for name in ("max_model_len", "tensor_parallel_size")] == [100, 2]
    assert [arguments[name] for name in ("max_num_seqs", "block_size")] == [3, 16]
    assert arguments["logprobs_mode"] == "processed_logprobs"


def test_a_spec_survives_the_way_to_another_process() -> None:
    original = spec(urls=(), engine_args={"a": [1, {"b": 2}]}, kv_cache_gb=0.25)
    assert pickle.loads(pickle.dumps(original)) == original  # noqa: S301 (our own)


def adapter_of(model: Path, lora: LoraConfig | None, sends: bool | None = None, **settings: Any) -> Any:
    """The adapter that engines of such a run are sent alone. sends: what `weight_sync.adapters` says. settings: of the
    model."""
    run = run_config(model, model=ModelConfig(path=str(model), **settings), backend=LocalBackendConfig(lora=lora))
    facts = SourceFacts(without_critic=None, sends_adapters=sends)
    object.__setattr__(run, "source", SimpleNamespace(facts=facts))
    return engine_spec(VllmEngineConfig(), run).adapter


def test_engines_have_room_for_the_modules_that_are_adapted_and_for_no_others(spurline_tiny_model: Path) -> None:
    adapter = adapter_of(spurline_tiny_model, LoraConfig(rank=9))
    linear = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
    assert adapter == EngineAdapter(9, linear)
    asked = replace(spec(), adapter=adapter)
    arguments = engine_arguments(asked, on_cpu=True)
    assert {name: arguments[name] for name in ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules")} == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 16,
        "lora_target_modules": list(linear),
    }
    assert "enable_lora" not in engine_arguments(spec(), on_cpu=True)
    chosen = adapter_of(spurline_tiny_model, LoraConfig(rank=4, target_modules=("self_attn.q_proj", "lm_head")))
    assert chosen == EngineAdapter(4, ("lm_head", "q_proj"))


@pytest.mark.parametrize(
    ("lora", "settings"), [({"rank": 513}, {}), ({"target_modules": ("embed_tokens",)}, {}), ({}, {"init": "random"})]
)
def test_an_adapter_that_vllm_does_not_take_is_sent_merged(
    spurline_tiny_model: Path, lora: dict[str, Any], settings: dict[str, Any]
) -> None:
    model = spurline_tiny_model
    assert adapter_of(model, None) is None
    assert adapter_of(model, LoraConfig(**lora), **settings) is None
    assert adapter_of(model, LoraConfig(), sends=False) is None


def test_adapters_of_experts_are_sent_merged_and_those_of_attention_alone(tmp_path: Path) -> None:
    model = write_tiny_moe_model(tmp_path / "experts")
    assert adapter_of(model, LoraConfig()) is None
    assert adapter_of(model, LoraConfig(target_modules=("q_proj", "o_proj"))) == EngineAdapter(16, ("o_proj", "q_proj"))


def test_the_environment_is_as_before_when_an_engine_has_been_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.delenv(launch.OWNER, raising=False)
    before = dict(os.environ)
    with engine_environment(VllmEngineConfig(cpu_threads=3)):
        assert os.environ["OMP_NUM_THREADS"] == "3"
        assert os.environ[launch.OWNER] == str(os.getpid())
        assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert dict(os.environ) == before


@pytest.mark.processes
def test_what_processes_of_an_engine_write_goes_to_its_log_and_nothing_else_does(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "engines" / "engine-0.log"
    with writing_to(log):
        engine = multiprocessing.get_context("spawn").Process(target=os.write, args=(2, b"noise"))
        engine.start()
        os.write(2, b"ours")
        engine.join(60)
    assert (capfd.readouterr().err, last_words(str(log))) == ("ours", "noise")


_WORKER = "(Worker_TP1 pid=738) ERROR 11-23 22:17:25 [multiproc_executor.py:944] "
_CORE = "(EngineCore pid=326) "


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        # As vLLM's processes write: the worker that fails, and whoever waits for it.
        (
            [f"{_WORKER}  File {'x' * 100}", f"{_WORKER}    param.load(", f"{_WORKER}RuntimeError: wrong size"]
            + [f"{_CORE}  File {'y' * 100}, line {number}" for number in range(100)]
            + [f"{_CORE}Exception: See stack trace."],
            [f"{_WORKER}RuntimeError: wrong size", f"{_CORE}Exception: See stack trace."],
        ),
        ([], []),
    ],
)
def test_an_engine_that_does_not_start_shows_the_errors_in_its_log_and_nothing_of_earlier_ones(
    written: list[str], shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text("earlier words\n")

    def fail(_: object) -> None:
        with log.open("a") as file:
            file.write("\n".join(written))
        raise RuntimeError("See root cause above.")

    platform = SimpleNamespace(is_cpu=lambda: True)
    for name, module in {
        "vllm": SimpleNamespace(AsyncEngineArgs=dict),
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.v1.engine.async_llm": SimpleNamespace(AsyncLLM=SimpleNamespace(from_engine_args=fail)),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(EngineDiedError, match="See root cause above") as refused:
        EngineStart(replace(spec(), log=log)).run()
    first, *lines = str(refused.value).splitlines()
    assert ("engine-0.log" in str(refused.value), lines[1:]) == (bool(written), shown), first


@pytest.mark.parametrize(
    ("settings", "peers_elsewhere", "expected"),
    [
        ({}, False, {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}),
        ({}, True, {"GLOO_SOCKET_IFNAME": "lo"}),
        ({"engine_args": {"distributed_executor_backend": "ray"}}, False, {}),
    ],
)
def test_processes_of_an_engine_meet_on_the_loopback_where_all_are_on_one_machine(
    settings: dict[str, Any], peers_elsewhere: bool, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with engine_environment(VllmEngineConfig(**settings), peers_elsewhere=peers_elsewhere):
        assert {name: os.environ[name] for name in names if name in os.environ} == expected
        assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


@pytest.mark.parametrize(
    ("package", "settings", "message"),
    [
        ("vllm", {}, r"vllm is not installed.*pip install 'spurline-async-rl\[vllm\]'.*install_vllm_cpu"),
        ("ray", {"placement": "ray"}, r"ray is not installed.*pip install 'spurline-async-rl\[ray\]'"),
    ],
)
def test_a_missing_package_is_an_error_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
    spurline_tiny_model: Path,
    tmp_path: Path,
    package: str,
    settings: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(engine_module, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(ConfigError, match=message):
        vllm_engine(spurline_tiny_model, tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"mode": "server"}, "urls"),
        ({"urls": ("http://a",)}, "urls"),
        ({"mode": "server", "urls": ("localhost:9999",)}, "urls"),
        ({"mode": "server", "urls": ("http://",)}, "urls"),
        ({"mode": "server", "urls": ("http://a:port",)}, "urls"),
        ({"mode": "server", "urls": ("http://a", "http://a")}, "urls"),
        ({"mode": "server", "urls": ("http://a",), "engines": 2}, "engines"),
        ({"mode": "server", "urls": ("http://a",), "dtype": "float32"}, "dtype"),
        ({"mode": "server", "urls": ("http://a",), "kv_cache": "keep"}, "kv_cache"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    assert [problem.key for problem in VllmEngineConfig(**settings).problems(run_config(tmp_path))] == [key]


def test_a_worker_answers_what_it_did_not_get_and_that_is_no_end_of_the_engine() -> None:
    sync = CollectiveSync(CollectiveSyncConfig())
    sync.limit_s = 0.3
    sync.prepare({"engine 0": 1, "engine 1": 1}, is_lost=False)
    bucket = next(sync.make_buckets(1, BACKEND))
    worker = WorkerExtension()
    worker.rank, worker.device, worker.vllm_config = 0, torch.device("cpu"), None
    answer = worker.spurline_load_bucket({**bucket.to_plain(), "receiver": "engine 0"})
    sync.close()
    with pytest.raises(BucketLostError, match="engine 1 did not join"):
        check_complete([None, answer])


def so_far(token_ids: list[int], version: int = 1) -> Progress:
    progress = Progress()
    progress.add(token_ids, [-0.5] * len(token_ids), version)
    return progress


def response(progress: Progress | None = None, **asked: Any) -> VllmResponse:
    return VllmResponse(
        request([40, 41], **asked),
        Progress() if progress is None else progress,
        tiny_tokenizer(),
        max_model_len=100,
        vocabulary=300,
    )


def test_the_context_bounds_a_response() -> None:
    assert response(max_new_tokens=500).rest().sampling.max_new_tokens == 98


def test_tokens_behind_a_stop_text_do_not_belong_to_the_response() -> None:
    progress = so_far([60], version=3)
    ongoing = response(progress, stop=(tiny_tokenizer().decode([60, 61]),), temperature=0.5)
    assert ongoing.add_delta(Delta([61, 62], [-1.0, -2.0]), 4) == "stop"
    assert progress.token_ids.tolist() == [60, 61]
    assert progress.logprobs.tolist() == [-0.5, -1.0]
    assert progress.versions.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([5] * 100, "100.*context for prompt and response has 100"), ([299, 300], "token 300.*0 to 299")],
)
def test_a_prompt_that_the_model_cannot_read_is_an_error_that_names_it(prompt: list[int], message: str) -> None:
    with pytest.raises(DataError, match=f"asked by a test.*{message}"):
        VllmResponse(request(prompt), Progress(), tiny_tokenizer(), max_model_len=100, vocabulary=300)


def test_files_hold_the_weights_until_the_next_bucket_is_asked_for(tmp_path: Path) -> None:
    sync = disk(tmp_path)
    (tmp_path / "spurline-weights-1-0.safetensors").write_text("left by a killed run")
    read: list[tuple[str, torch.Tensor]] = []
    names = []
    for bucket in sync.make_buckets(2, BACKEND):
        files = [path.name for path in tmp_path.iterdir()]
        assert files == [Path(bucket.where["path"]).name]
        names += files
        read += [(name, tensor.clone()) for name, tensor in read_file(bucket)]
    assert len(set(names)) == len(names) > 1
    assert list(tmp_path.iterdir()) == []
    for (name, expected), (got_name, got) in zip(WEIGHTS, read, strict=True):
        assert got_name == name
        assert torch.equal(got, expected)


def test_a_missing_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    bucket = next(disk(tmp_path).make_buckets(2, BACKEND))
    Path(bucket.where["path"]).unlink()
    with pytest.raises(RunFailedError, match=r"no such file.*weight_sync\.folder"):
        list(read_file(bucket))
