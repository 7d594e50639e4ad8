"""What a plan says of memory is near what a GPU has allocated at the peak of an update."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import Sample, lay_out, local_backend, run_config, write_model_folder

from spurline.config.run_config import ModelConfig
from spurline.protocols.loss import Objective
from spurline_models.configs import LoraConfig
from spurline_models.device_profile import device_profile
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_models.optimizers.configs import AdamW8BitConfig, AdamWConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 2**20
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
    "max_position_embeddings": 8192,
}
MASTERS = {"precision": "bf16", "weights": "bf16_masters"}


def update_peak(layers: int, tokens: int, folder: Path, eight_bits: bool, settings: dict[str, Any]) -> tuple[int, int]:
    """Bytes allocated at the peak of the third update and those that a plan says, beside what was there before."""
    if eight_bits:
        pytest.importorskip("bitsandbytes")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    write_model_folder(folder, num_hidden_layers=layers, **SHAPE)
    run: dict[str, Any] = {
        "model": ModelConfig(path=str(folder), init="random"),
        "optimizer": AdamW8BitConfig() if eight_bits else AdamWConfig(),
    }
    backend = local_backend(folder, run=run, device="cuda", probe=False, **settings)
    length = tokens // 4
    # The first token of a text has none before it to be predicted from.
    batch = lay_out([Sample(str(n), (7,) * length, (0.0,) + (1.0,) * (length - 1)) for n in range(4)])
    objective = Objective(CrossEntropy(CrossEntropyConfig()), float(tokens))
    for _ in range(2):
        backend.update(batch, objective)
    torch.cuda.reset_peak_memory_stats()
    backend.update(batch, objective)
    peak = torch.cuda.max_memory_allocated() - before
    config = LocalBackendConfig(device="cuda", **settings)
    return peak, config.estimate_memory(run_config(folder, **run), tokens // 4, tokens).peak


@pytest.mark.parametrize(
    ("settings", "eight_bits"),
    [
        ({}, False),
        ({"activation_checkpointing": True}, False),
        ({"logits_chunk_tokens": 512}, False),
        ({"precision": "bf16"}, False),
        ({"precision": "bf16", "activation_checkpointing": True}, False),
        (MASTERS, False),
        ({**MASTERS, "offload_optimizer": True}, False),
        ({"precision": "bf16"}, True),
        ({"lora": LoraConfig(rank=16, base_dtype="bf16")}, False),
        ({"lora": LoraConfig(rank=16, base_dtype="bf16"), "precision": "bf16"}, False),
        ({"rows_per_microbatch": 2}, False),
    ],
    ids=str,
)
def test_a_plan_says_what_is_allocated(tmp_path: Path, settings: dict[str, Any], eight_bits: bool) -> None:
    measured, said = update_peak(8, 4096, tmp_path / "model", eight_bits, settings)
    # Activations follow a rule of thumb; all else is exact.
    assert 0.8 * measured - 64 * MIB < said < 1.4 * measured + 64 * MIB


@pytest.mark.parametrize(
    ("settings", "eight_bits", "known"),
    [
        ({}, False, 16.0),
        (MASTERS, False, 16.0),
        ({**MASTERS, "offload_optimizer": True}, False, 4.0),
        (MASTERS, True, 10.1),
        ({"lora": LoraConfig(rank=1, base_dtype="bf16")}, False, 2.0),
    ],
    ids=str,
)
def test_bytes_of_each_further_parameter(
    tmp_path: Path, settings: dict[str, Any], eight_bits: bool, known: float
) -> None:
    peaks = [update_peak(layers, 16, tmp_path / str(layers), eight_bits, settings)[0] for layers in (4, 12)]
    hidden, ffn = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    # 16 heads and twice 8 of 64: queries and outputs are of the hidden size, keys and values of half of it.
    parameters = 8 * hidden * (2 * hidden + hidden + 3 * ffn)
    assert (peaks[1] - peaks[0]) / parameters == pytest.approx(known, rel=0.05, abs=0.1)


def test_kept_host_memory_is_pinned_and_copies_to_it_need_not_wait() -> None:
    profile = device_profile("cuda")
    kept = profile.pinned_exactly((5, 1000), torch.float32)
    assert kept.is_pinned()
    values = torch.randn(5, 1000, device="cuda")
    kept.copy_(values, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(kept, values.cpu())
    # No page may still be pinned when others get its memory.
    del kept
    for size in range(1, 40):
        assert profile.pinned_exactly((size * 1000,), torch.bfloat16).is_pinned()
