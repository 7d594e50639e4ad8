"""Weight files that are missing, broken or of another model are named, with what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import local_backend

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline.model.weight_files import check_weight_files
from spurline.testing.inputs import write_tiny_model

Break = Callable[[Path], object]
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def load(folder: Path) -> None:
    local_backend(folder, run={"model": ModelConfig(path=str(folder))})


def cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def only(name: str, content: bytes) -> Break:
    def replace(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(content)

    return replace


def index_of(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"weight{number}": name for number, name in enumerate(shards)}}).encode()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (cut, r"model\.safetensors is truncated or no safetensors file \(.*incomplete.*Copy or download it again"),
        (only(WEIGHTS, b"garbage" * 99), r"model\.safetensors is truncated or no safetensors file"),
        (only(WEIGHTS, b""), r"model\.safetensors is empty"),
        (only(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), r"pointer of Git LFS.*git lfs pull"),
        (only("pytorch_model.bin", b""), r"pytorch_model\.bin is empty"),
        (only("pytorch_model.bin", b"garbage" * 99), r"pytorch_model\.bin is truncated or was not written by torch"),
        (only("pytorch_model.bin", b"PK\x03\x04garbage"), r"pytorch_model\.bin is truncated or was not written"),
        (only("pytorch_model.bin", b"\x80\x02garbage"), r"no weights can be loaded from folder"),
        (only("model.safetensors.index.json", b"{"), r"index\.json is no index of weights"),
        (only("model.safetensors.index.json", b"[1]"), r"index\.json is no index of weights"),
        (
            only("model.safetensors.index.json", index_of("a.safetensors", "b.safetensors")),
            r"names 2 files, of which a\.safetensors, b\.safetensors are not in .*Copy or download the rest",
        ),
        (only("notes.txt", b""), r"(?s)has none of model\.safetensors.*notes\.txt.*init: random"),
    ],
    ids=[
        "truncated",
        "garbage",
        "empty",
        "lfs pointer",
        "empty bin",
        "garbage bin",
        "broken zip",
        "broken pickle",
        "broken index",
        "index of another shape",
        "missing shards",
        "nothing",
    ],
)
def test_a_broken_file_is_named_with_what_to_do(folder: Path, spoil: Break, message: str) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_files_that_are_whole_pass(folder: Path) -> None:
    check_weight_files(ModelConfig(path=str(folder)))
    torch.save({"weight": torch.zeros(2)}, folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()
    check_weight_files(ModelConfig(path=str(folder)))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_of_another_shape_are_named_with_both_shapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(folder, hidden_size=64)
    with pytest.raises(ModelError, match=r"21 weights .* lm_head\.weight is \(259, 32\) in the files and \(259, 64\)"):
        load(folder)
    assert capsys.readouterr().err == "", "transformers prints no table besides"


def test_weights_that_the_files_lack_are_no_random_ones(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match=r"lack 11 weights .* stay random: model\.layers\.2\.input_layernorm\.weight"):
        load(folder)


def test_tied_output_layers_lack_nothing(tmp_path: Path) -> None:
    load(write_tiny_model(tmp_path / "tied", tie_word_embeddings=True))


def test_weights_without_a_place_are_told_and_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(folder, num_hidden_layers=1, layer_types=["full_attention"])
    load(folder)
    assert "11 weights of" in caplog.text
    assert "model.layers.1.input_layernorm.weight" in caplog.text
