"""What a plan says of a device that engines and trainer have by turns, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from backend_batches import run_config, write_model_folder

from spurline.config.run_config import RunConfig
from spurline_async_rl.engines.configs import ChildProcessEngineConfig, PoolConfig, VllmEngineConfig
from spurline_models.rollout_load import ColocatedEngine
from spurline_planning.fit import Load
from spurline_planning.phases import phase_lines

GIB = 1 << 30
LENGTH = 1024


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """One GiB of weights in fp32: 2^28 values of an embedding that is also the output layer, and little else."""
    folder = write_model_folder(
        tmp_path_factory.mktemp("model"), vocab_size=1 << 18, hidden_size=1 << 10, tie_word_embeddings=True
    )
    return run_config(folder)


def load_of(config: PoolConfig, bucket_bytes: int = 0) -> Load:
    return Load(LENGTH, 4 * LENGTH, engine=ColocatedEngine(config, "source.engine", 64, LENGTH, bucket_bytes))


def lines_of(run: RunConfig, load: Load, gib: float) -> dict[str, str]:
    """The lines by what comes before their colon."""
    lines = phase_lines(run, load, int(gib * GIB))
    return {head: tail for head, _, tail in (line.partition(": ") for line in lines)}


def suggested(run: RunConfig, load: Load, gib: float, phase: str) -> str:
    """What is suggested for a phase that does not fit."""
    lines = iter(phase_lines(run, load, int(gib * GIB)))
    found = next(line for line in lines if line.startswith(f"{phase} does not fit a device of {gib:.1f} GiB, of which"))
    assert "90% can be counted on" in found
    return next(lines).removeprefix("suggestion: ")


def mib_of(line: str) -> int:
    return int(line.partition(" MiB")[0].replace(",", ""))


def vllm(**settings: Any) -> VllmEngineConfig:
    return VllmEngineConfig(placement="colocated", **settings)


def test_each_phase_adds_up_what_is_on_the_device_then(run: RunConfig) -> None:
    lines = lines_of(run, load_of(vllm(gpu_memory_utilization=0.5), bucket_bytes=32 << 20), 40)
    # The small rest of the model is 1.6 million values.
    weights = mib_of(lines["publishing"])
    # 2 bytes of a weight in the engine, 4 in the trainer, and four buckets on their way.
    assert 512 + 1024 + 4 * 32 <= weights <= 512 + 1024 + 4 * 32 + 12
    # Half of the device, and the trainer's weights.
    assert 20 * 1024 + 1024 <= mib_of(lines["generating"]) <= 20 * 1024 + 1024 + 8
    assert "the engine's weights 51" in lines["generating"]
    # Weights, gradients and two moments are 4 GiB; activations and logits come on top.
    assert mib_of(lines["training"]) > 4 * 1024
    assert "each phase fits a device of 40.0 GiB" in lines


def test_a_trainer_that_leaves_gives_all_of_the_device_to_the_engine(run: RunConfig) -> None:
    stays = lines_of(run, load_of(vllm(gpu_memory_utilization=0.5)), 40)
    leaves = lines_of(run, load_of(vllm(gpu_memory_utilization=0.5, offload_trainer=True)), 40)
    assert mib_of(leaves["generating"]) == 20 * 1024
    assert mib_of(stays["generating"]) > 21 * 1024
    assert leaves["publishing"] == stays["publishing"], "weights come from the device, whatever leaves it afterwards"


def test_a_share_of_the_whole_gpu_is_lowered_to_what_the_trainer_leaves(run: RunConfig) -> None:
    # Nine tenths of 40 GiB can be counted on, of which the trainer keeps just over 1 GiB: 34.99 / 40 is 0.8749.
    suggestion = suggested(run, load_of(vllm()), 40, "generating")
    assert suggestion.startswith("--set source.engine.gpu_memory_utilization=0.87, with which generating needs")


def test_a_cache_of_its_own_size_is_lowered_too(run: RunConfig) -> None:
    # Of 9 GiB that can be counted on, 1 GiB and a little is the trainer's and half of that the engine's: 7.4 are left.
    suggestion = suggested(run, load_of(vllm(kv_cache_gb=9)), 10, "generating")
    assert suggestion.startswith("--set source.engine.kv_cache_gb=7.4, with which generating needs")


def test_weights_leave_where_no_response_has_room_beside_them(run: RunConfig) -> None:
    # Of 1.6 GiB less is there than the weights of both, and enough for the engine's and one response's keys and values.
    load = load_of(vllm(gpu_memory_utilization=0.9))
    assert suggested(run, load, 1.6, "generating").startswith("--set source.engine.offload_trainer=true, with which")
    publishing = suggested(run, load, 1.6, "publishing")
    assert "no setting of the engine makes it fit" in publishing
    assert "fsdp" in publishing, "the backend says what is beyond its settings"


def test_smaller_buckets_make_a_publish_fit(run: RunConfig) -> None:
    # Of 3.6 GiB weights take just over 1.5, so that each of four buckets may have just under 0.525 GiB, 537 MiB.
    suggestion = suggested(run, load_of(vllm(gpu_memory_utilization=0.5), bucket_bytes=GIB), 4, "publishing")
    found = int(suggestion.removeprefix("--set source.weight_sync.bucket_mb="))
    assert 530 <= found <= 537
    assert "publishing does not" not in "".join(
        phase_lines(run, load_of(vllm(gpu_memory_utilization=0.5), bucket_bytes=found << 20), 4 * GIB)
    )


def test_child_engines_hold_fewer_tokens_where_they_would_not_fit(run: RunConfig) -> None:
    engine = ChildProcessEngineConfig(placement="colocated", device="cuda")
    cache = engine.colocated_memory(run, 64, LENGTH, 0)["cache"]
    of_token = cache // (64 * LENGTH)
    assert cache == 64 * LENGTH * of_token
    weights = engine.colocated_memory(run, 64, LENGTH, 0)["weights"]
    # Room for the weights of both and half of the tokens.
    gib = (2 * weights + cache // 2) / 0.9 / GIB
    suggestion = suggested(run, load_of(engine), gib, "generating")
    found = int(suggestion.partition("max_cache_tokens=")[2].partition(",")[0])
    assert found == pytest.approx(32 * LENGTH, abs=2)


def test_every_suggestion_makes_its_phase_fit(run: RunConfig) -> None:
    for gib in (2.0, 3.0, 6.0, 12.0, 80.0):
        for settings in ({}, {"kv_cache_gb": 4.0}, {"offload_trainer": True}, {"gpu_memory_utilization": 1.0}):
            engine = vllm(**settings)
            for line in phase_lines(run, load_of(engine), int(gib * GIB)):
                if not line.startswith("suggestion: --set source.engine."):
                    continue
                words = [word for word in line.removesuffix(",").split() if word.startswith("source.engine.")]
                pairs = (word.removeprefix("source.engine.").rstrip(",").split("=") for word in words)
                changed = VllmEngineConfig.model_validate({**engine.model_dump(), **dict(pairs)})
                phase = line.partition("with which ")[2].partition(" ")[0]
                after = phase_lines(run, load_of(changed), int(gib * GIB))
                assert not any(found.startswith(f"{phase} does not") for found in after), (gib, settings, line)


def test_a_run_whose_engines_have_devices_of_their_own_has_no_phases(run: RunConfig) -> None:
    assert phase_lines(run, Load(LENGTH, 4 * LENGTH), 80 * GIB) == []
