"""A sync sends the adapters alone where the engines take them, and whole merged weights everywhere else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from backend_batches import lay_out, local_backend, make_samples, run_config, write_model_folder
from fsdp_layouts import on
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from weight_takers import Taker, make_sync

from spurline.config.run_config import ModelConfig
from spurline.errors import RunFailedError
from spurline.protocols.loss import Objective
from spurline_async_rl.engines.configs import VllmEngineConfig
from spurline_async_rl.engines.vllm.adapters import EngineAdapter, engine_adapter
from spurline_async_rl.weights.buckets import BucketSync
from spurline_models.configs import LoraConfig
from spurline_models.local.backend import LocalBackend
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_rl.protocols.weight_sync import SyncReport
from spurline_rl.testing.backend_cases import assert_weights_equal, minibatch
from spurline_rl.testing.backend_runs import backend_run, opened

OBJECTIVE = Objective(CrossEntropy(CrossEntropyConfig()), 9.0)
LORA = LoraConfig(rank=4, alpha=8.0)


def publish(sync: BucketSync, version: int, backend: Any, *takers: Taker) -> SyncReport:
    return asyncio.run(sync.publish(version, backend, takers))


def adapter_of(backend: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in backend.named_adapter_weights()}


@pytest.fixture
def adapted(tmp_path: Path) -> LocalBackend:
    return local_backend(write_model_folder(tmp_path / "model"), lora=LORA)


@pytest.mark.parametrize("transport", ["shared_memory", "disk", "collective", "in_process"])
def test_each_publish_brings_the_adapter_as_it_is_now_and_nothing_else(
    adapted: LocalBackend, tmp_path: Path, transport: str
) -> None:
    # An engine that keeps its weights in bf16 gets the adapter as it was trained. The adapter takes several buckets.
    sync, taker = make_sync(transport, tmp_path, 5_000), Taker(takes_adapters=True, dtype="bfloat16")
    seen: list[dict[str, Tensor]] = []
    try:
        for version in (1, 2, 3):
            adapted.update(lay_out(make_samples([9, 12], seed=version)), OBJECTIVE)
            expected = adapter_of(adapted)
            report = publish(sync, version, adapted, taker)
            assert_weights_equal(taker.taken, expected)
            assert report.bytes_sent == sum(tensor.nbytes for tensor in expected.values())
            assert {tensor.dtype for tensor in taker.taken.values()} == {torch.float32}
            assert (taker.version, len(taker.buckets) > 2 * version) == (version, True)
            seen.append(expected)
        assert taker.began == [("adapter", version) for version in (1, 2, 3)]
        assert taker.adapter == adapted.adapter_settings()
        assert any(not torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
    finally:
        sync.close()


def test_peft_takes_what_came_as_its_own(adapted: LocalBackend, tmp_path: Path) -> None:
    sync, taker = make_sync("in_process", tmp_path), Taker(takes_adapters=True)
    adapted.update(lay_out(make_samples([9, 12])), OBJECTIVE)
    publish(sync, 1, adapted, taker)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    built = peft.get_peft_model(base, peft.PeftConfig.from_peft_type(**taker.adapter))
    assert peft.set_peft_model_state_dict(built, dict(taker.taken)).unexpected_keys == []
    assert_weights_equal(peft.get_peft_model_state_dict(built), adapter_of(adapted))


@pytest.mark.parametrize(
    ("adapters", "able"), [(True, (False,)), (True, (True, False)), (False, (True,))], ids=["unable", "one", "refused"]
)
def test_whole_merged_weights_are_sent_where_an_engine_takes_no_adapters_or_the_run_asks_for_it(
    adapted: LocalBackend, tmp_path: Path, adapters: bool, able: tuple[bool, ...]
) -> None:
    sync, takers = make_sync("in_process", tmp_path, adapters=adapters), [Taker(takes_adapters=each) for each in able]
    adapted.update(lay_out(make_samples([9, 12])), OBJECTIVE)
    report = publish(sync, 1, adapted, *takers)
    expected = {name: tensor.clone() for name, tensor in adapted.named_weights()}
    for taker in takers:
        assert_weights_equal(taker.taken, expected)
        assert taker.began == [("model", 1)]
    assert report.bytes_sent == sum(tensor.nbytes for tensor in expected.values())
    # Another kind of engine alone changes nothing: what others have would not fit it any more.
    publish(sync, 2, adapted, Taker(takes_adapters=True))
    last = Taker(takes_adapters=True)
    publish(sync, 3, adapted, last)
    assert last.began == [("model", 3)]


def test_engines_of_vllm_make_room_for_adapters_that_they_compute_as_the_trainer_does(
    spurline_tiny_model: Path,
) -> None:
    model = ModelConfig(path=str(spurline_tiny_model))

    def room(dtype: str = "auto", **lora: Any) -> EngineAdapter | None:
        settings = LoraConfig.model_validate({"rank": 4, "target_modules": ["q_proj"], **lora})
        run = run_config("m", model=model, backend=LocalBackendConfig(lora=settings))
        return engine_adapter(VllmEngineConfig.model_validate({"dtype": dtype}), run)

    assert room(base_dtype="nf4") is None
    assert room(rslora=True) == EngineAdapter(4, ("q_proj",))
    assert room("float32") == room("bfloat16", base_dtype="bf16") == EngineAdapter(4, ("q_proj",))
    assert room("float32", base_dtype="bf16") is None, "it would add the adapter to weights that are not rounded"


def test_an_engine_that_takes_no_adapters_after_others_did_is_an_error_before_an_update_begins(
    adapted: LocalBackend, tmp_path: Path
) -> None:
    sync, unable = make_sync("in_process", tmp_path), Taker(takes_adapters=False)
    publish(sync, 2, adapted, Taker(takes_adapters=True))
    with pytest.raises(RunFailedError, match=r"takes no adapters.*weight_sync\.adapters: false"):
        publish(sync, 3, adapted, unable)
    assert unable.began == []


@pytest.mark.processes
def test_ranks_send_their_adapter_without_a_weight_below_it_coming_to_the_controller(
    spurline_tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise AssertionError("weights came to the controller")

    run = backend_run(spurline_tiny_model, on(2, lora={"rank": 3, "alpha": 8.0}, probe=False), ("fsdp_backend",))
    with opened(run) as (backend, layout):
        for transport in ("shared_memory", "collective"):
            sync, taker = make_sync(transport, tmp_path), Taker(takes_adapters=True)
            for version in (1, 2):
                backend.update(*minibatch("packed", layout, version))
                expected = adapter_of(backend)
                with monkeypatch.context() as patch:
                    patch.setattr(type(backend), "named_weights", refuse)
                    patch.setattr(type(backend), "named_adapter_weights", refuse)
                    report = publish(sync, version, backend, taker)
                assert_weights_equal(taker.taken, expected)
                assert report.bytes_sent == sum(tensor.nbytes for tensor in expected.values())
            assert taker.began == [("adapter", 1), ("adapter", 2)]
            sync.close()
