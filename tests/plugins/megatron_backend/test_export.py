"""A checkpoint of ranks is exported by one process alone, as the ranks write it, and transformers opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import train
from megatron_layouts import on, write_llama3, write_qwen3, write_qwen3_moe, write_qwen25
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from spurline.digests import FileDigest
from spurline.errors import CheckpointError
from spurline.plugins.registry import resolve
from spurline_models import saved_weights
from spurline_models.weight_files import write_weight_files
from spurline_rl.testing.backend_cases import weights_of
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

FILE_BYTES = 30_000


@pytest.mark.parametrize(
    ("write", "overrides", "settings"),
    [
        pytest.param(write_qwen3, {"tie_word_embeddings": True}, on(2, pipeline=2), id="tied"),
        pytest.param(write_qwen3_moe, {}, on(2, tensor=2, expert=2), id="experts"),
        pytest.param(write_qwen25, {}, on(4, tensor=2), id="biases", marks=pytest.mark.slow),
        pytest.param(write_llama3, {}, on(3), id="llama", marks=pytest.mark.slow),
        pytest.param(
            write_qwen3,
            {"num_hidden_layers": 4},
            on(4, tensor=2, pipeline=2, virtual_stages=2),
            id="interleaved",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_process_exports_what_ranks_write_and_transformers_opens_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[..., Path],
    overrides: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    loaded = backend_run(write(tmp_path / "model", **overrides), settings, ("megatron_backend",))
    checkpoint, written = tmp_path / "checkpoint", tmp_path / "written"
    checkpoint.mkdir()
    written.mkdir()
    with opened(loaded) as (backend, _):
        train(backend, range(2))
        digests = backend.save(checkpoint)
        weights = weights_of(backend)
        backend.write_weights(written, torch.float32, FILE_BYTES)

    def refuse(*arguments: object) -> None:
        raise AssertionError("the whole model was loaded")

    monkeypatch.setattr(saved_weights, "load_model", refuse)
    out = export(loaded.config, checkpoint, digests, tmp_path / "out")
    assert contents(out) == contents(written)
    assert len(list(out.glob("*.safetensors"))) > 2
    exported = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], weight) for name, weight in weights.items())
    monkeypatch.undo()
    AutoConfig.from_pretrained(tmp_path / "model").save_pretrained(out)
    causal, info = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    embedding = causal.get_input_embeddings().weight
    assert torch.equal(embedding, weights["model.embed_tokens.weight"])

    path = sorted((checkpoint / "policy").glob("rank-00001.*"))[0]
    path.write_bytes(path.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError, match=r"rank-00001\.part-000\.safetensors"):
        export(loaded.config, checkpoint, digests, tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def export(run: Any, checkpoint: Path, digests: Mapping[str, FileDigest], out: Path) -> Path:
    """Read the checkpoint as `spurline export` does."""
    stream = resolve(run.backend.facts.checkpoint_reader, "reader")(run, checkpoint, digests)
    out.mkdir()
    write_weight_files(out, stream, torch.float32, FILE_BYTES)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
