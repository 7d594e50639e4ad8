"""What a plan says of a device that engines and trainer have by turns, against numbers worked out by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from backend_batches import run_config, write_model_folder

from spurline.config.run_config import RunConfig
from spurline_async_rl.engines.configs import ChildProcessEngineConfig, PoolConfig, VllmEngineConfig
from spurline_models.backend_config import ColocatedEngine
from spurline_planning.fit import Load, phase_lines

GIB = 1 << 30
LENGTH = 1024


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """One GiB of weights in fp32: 2^28 values of an embedding that is also the output layer, and little else."""
    folder = write_model_folder(
        tmp_path_factory.mktemp("model"), vocab_size=1 << 18, hidden_size=1 << 10, tie_word_embeddings=True
    )
    return run_config(folder)


def load_of(run: RunConfig, config: PoolConfig, bucket_bytes: int = 0) -> Load:
    memory = partial(config.colocated_memory, run, 64, LENGTH)
    engine = ColocatedEngine(memory, config.offloads_trainer, config.takes_less, bucket_bytes)
    return Load(LENGTH, 4 * LENGTH, engine=engine)


def lines_of(run: RunConfig, load: Load, gib: float) -> dict[str, str]:
    """The lines by what comes before their colon."""
    lines = phase_lines(run, load, int(gib * GIB))
    return {head: tail for head, _, tail in (line.partition(": ") for line in lines)}


def mib_of(line: str) -> int:
    return int(line.partition(" MiB")[0].replace(",", ""))


def vllm(**settings: Any) -> VllmEngineConfig:
    return VllmEngineConfig(placement="colocated", **settings)


def test_each_phase_adds_up_what_is_on_the_device_then(run: RunConfig) -> None:
    lines = lines_of(run, load_of(run, vllm(gpu_memory_utilization=0.5), bucket_bytes=32 << 20), 40)
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
    stays = lines_of(run, load_of(run, vllm(gpu_memory_utilization=0.5)), 40)
    leaves = lines_of(run, load_of(run, vllm(gpu_memory_utilization=0.5, offload_trainer=True)), 40)
    assert mib_of(leaves["generating"]) == 20 * 1024
    assert mib_of(stays["generating"]) > 21 * 1024
    assert leaves["publishing"] == stays["publishing"], "weights come from the device, whatever leaves it afterwards"


@pytest.mark.parametrize(
    ("engine", "bucket_bytes", "gib", "phase", "lower"),
    [
        (vllm(gpu_memory_utilization=0.9), 0, 40, "generating", "source.engine.gpu_memory_utilization"),
        (vllm(gpu_memory_utilization=0.1), 4 * GIB, 12, "publishing", "source.weight_sync.bucket_mb"),
        (vllm(gpu_memory_utilization=0.1), 0, 4, "training", "See memory above"),
        (
            ChildProcessEngineConfig(placement="colocated", device="cuda"),
            0,
            2,
            "generating",
            "source.engine.max_cache_tokens",
        ),
    ],
)
def test_a_phase_that_does_not_fit_says_what_to_lower(
    run: RunConfig, engine: PoolConfig, bucket_bytes: int, gib: float, phase: str, lower: str
) -> None:
    lines = phase_lines(run, load_of(run, engine, bucket_bytes), int(gib * GIB))
    [line] = [line for line in lines if line.startswith(f"{phase} does not fit a device of {gib:.1f} GiB")]
    assert lower in line


def test_a_run_whose_engines_have_devices_of_their_own_has_no_phases(run: RunConfig) -> None:
    assert phase_lines(run, Load(LENGTH, 4 * LENGTH), 80 * GIB) == []
