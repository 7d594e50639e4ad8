"""One process alone exports a checkpoint of ranks as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_layouts
import megatron_layouts
import pytest
import torch
from checkpoint_cases import train
from megatron_layouts import write_llama3, write_qwen3, write_qwen3_moe, write_qwen25
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from spurline.errors import CheckpointError
from spurline.plugins.registry import resolve
from spurline_models import saved_weights
from spurline_models.weight_files import write_weight_files
from spurline_rl.testing.backend_cases import weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

PLUGINS = ("fsdp_backend", "megatron_backend")
FILE_BYTES = 30_000
fsdp, megatron, soak = fsdp_layouts.on, megatron_layouts.on, pytest.mark.slow
tied, four_layers = partial(write_qwen3, tie_word_embeddings=True), partial(write_qwen3, num_hidden_layers=4)


@pytest.mark.parametrize(
    ("write", "settings"),
    [
        pytest.param(tied, fsdp(2), id="fsdp-tied"),
        pytest.param(write_qwen3, fsdp(2, lora={"rank": 4, "alpha": 8.0}), id="fsdp-adapters"),
        pytest.param(write_qwen3_moe, fsdp(2), id="fsdp-experts"),
        pytest.param(write_qwen3, fsdp(4, replicas=2), id="fsdp-replicas", marks=soak),
        pytest.param(tied, megatron(2, pipeline=2), id="megatron-tied"),
        pytest.param(write_qwen3_moe, megatron(2, tensor=2, expert=2), id="megatron-experts"),
        pytest.param(write_qwen25, megatron(4, tensor=2), id="megatron-biases", marks=soak),
        pytest.param(write_llama3, megatron(3), id="megatron-llama", marks=soak),
        pytest.param(
            four_layers, megatron(4, tensor=2, pipeline=2, virtual_stages=2), id="megatron-interleaved", marks=soak
        ),
    ],
)
def test_one_process_exports_the_weights_of_ranks_and_transformers_opens_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], settings: dict[str, Any]
) -> None:
    run = backend_run(write(tmp_path / "model"), settings, PLUGINS)
    checkpoint, out, damaged = (tmp_path / name for name in ("checkpoint", "out", "damaged"))
    checkpoint.mkdir(), out.mkdir()
    with opened(run) as (backend, _):
        train(backend, range(2))
        digests = backend.save(checkpoint)
        weights = {name: weight.bfloat16() for name, weight in weights_of(backend).items()}

    def refuse(*arguments: object) -> None:
        raise AssertionError("the whole model was loaded")

    read = resolve(run.config.backend.facts.checkpoint_reader, "reader")
    monkeypatch.setattr(saved_weights, "load_model", refuse)
    write_weight_files(out, read(run.config, checkpoint, digests), torch.bfloat16, FILE_BYTES)
    monkeypatch.undo()
    files = list(out.glob("*.safetensors"))
    assert len(files) > 2
    exported = {name: value for file in files for name, value in load_file(file).items()}
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    AutoConfig.from_pretrained(tmp_path / "model").save_pretrained(out)
    _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    path = sorted((checkpoint / "policy").glob("rank-00001.*"))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError, match=r"rank-00001\.part-000\.safetensors"):
        write_weight_files(damaged, read(run.config, checkpoint, digests), torch.bfloat16, FILE_BYTES)
    assert not damaged.exists()
