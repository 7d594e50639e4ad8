"""Ranks write their weights as Hugging Face folders, and one process alone exports a checkpoint of theirs alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import fsdp_layouts
import megatron_layouts
import pytest
import torch
from checkpoint_cases import ONE, train
from megatron_layouts import write_llama3, write_qwen3, write_qwen3_moe, write_qwen25
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from spurline.errors import CheckpointError
from spurline.plugins.registry import resolve
from spurline_models import saved_weights
from spurline_models.weight_files import write_weight_files
from spurline_rl.testing.backend_cases import minibatch, weights_of
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
def test_one_process_exports_what_ranks_write_and_transformers_opens_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], Path], settings: dict[str, Any]
) -> None:
    run = backend_run(write(tmp_path / "model"), settings, PLUGINS)
    checkpoint, written, out, damaged = (tmp_path / name for name in ("checkpoint", "written", "out", "damaged"))
    checkpoint.mkdir(), written.mkdir(), out.mkdir()
    with opened(run) as (backend, _):
        train(backend, range(2))
        digests = backend.save(checkpoint)
        weights = {name: weight.bfloat16() for name, weight in weights_of(backend).items()}
        backend.write_weights(written, torch.bfloat16, FILE_BYTES)

    def refuse(*arguments: object) -> None:
        raise AssertionError("the whole model was loaded")

    read = resolve(run.config.backend.facts.checkpoint_reader, "reader")
    monkeypatch.setattr(saved_weights, "load_model", refuse)
    write_weight_files(out, read(run.config, checkpoint, digests), torch.bfloat16, FILE_BYTES)
    monkeypatch.undo()
    assert contents(out) == contents(written)
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


def test_ranks_that_cannot_write_say_so_and_stay(tmp_path: Path) -> None:
    with opened(backend_run(write_qwen3(tmp_path / "model"), fsdp(2), PLUGINS)) as (backend, _):
        with pytest.raises(OSError, match=r"rank 0 on .*No such file or directory.*missing"):
            backend.write_weights(tmp_path / "missing", torch.float32, FILE_BYTES)
        whole, taken = tmp_path / "whole", tmp_path / "taken"
        whole.mkdir(), taken.mkdir()
        backend.write_weights(whole, torch.float32, FILE_BYTES)
        names = sorted(path.name for path in whole.glob("*.safetensors"))
        (taken / names[1]).write_bytes(b"")
        with pytest.raises(OSError, match=f"rank 1 on .*File exists.*{names[1]}"):
            backend.write_weights(taken, torch.float32, FILE_BYTES)
        written, asked = contents(taken), contents(whole)
        assert all(written[name] == asked[name] for name in names[::2]), "the first rank has written its files"
        backend.update(*minibatch("packed", ONE, 0))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
