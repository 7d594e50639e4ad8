"""Weight files that lie, or that would run code, are refused from a few of their bytes, before memory is taken."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3_5TextConfig

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_models import weight_files
from spurline_models.architecture import load_model_config
from spurline_models.device_profile import device_profile
from spurline_models.loading import load_model
from spurline_models.testing.inputs import write_tiny_model
from spurline_models.weight_files import check_weight_files, layout_of, stored_dtype

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file. length: what it says its header has, if not the truth."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def check(folder: Path) -> None:
    """As a plan does, and a run before it loads; in memory of kilobytes."""
    tracemalloc.start()
    try:
        check_weight_files(ModelConfig(path=str(folder)))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 << 20


def load(folder: Path) -> PreTrainedModel:
    return load_model(ModelConfig(path=str(folder)), device_profile("cpu"), 0)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(safetensors({}, length=2**60), id="header of an exabyte"),
        pytest.param(safetensors({}, length=2**64 - 1), id="length that overflows"),
        pytest.param(safetensors(b"{}", bytes(8), length=11), id="header beyond the end"),
        pytest.param(
            safetensors({"a": tensor("F32", [2], 0, 8), "b": tensor("F32", [2], 4, 12)}, bytes(12)), id="overlap"
        ),
        pytest.param(safetensors({"a": tensor("F32", [2], 8, 16)}, bytes(16)), id="hole"),
        pytest.param(safetensors({"a": tensor("F32", [2], 0, 2**40)}, bytes(8)), id="tensor beyond the end"),
        pytest.param(safetensors({"a": tensor("F32", [2], 0, 8)}, bytes(16)), id="bytes of no tensor"),
        pytest.param(safetensors({"a": tensor("F32", [3], 0, 8)}, bytes(8)), id="shape of other bytes"),
        pytest.param(safetensors({"a": tensor("F32", [2**62, 8], 0, 8)}, bytes(8)), id="shape that overflows"),
        pytest.param(safetensors({"a": tensor("F32", [-2], 0, 8)}, bytes(8)), id="negative shape"),
        pytest.param(safetensors({"a": tensor("F99", [2], 0, 8)}, bytes(8)), id="unknown dtype"),
        pytest.param(safetensors(b'{"a":' * 20_000), id="deep header"),
        pytest.param(safetensors(b"\xff" * 64), id="no text"),
    ],
)
def test_a_header_that_lies_is_refused_with_its_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or no safetensors file \(.*again"):
        check(tmp_path)


def test_headers_longer_than_those_of_any_model_are_not_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "safe_open", None)
    with (tmp_path / WEIGHTS).open("wb") as file:
        file.write((99 << 20).to_bytes(8, "little"))
        file.truncate(100 << 20)
    with pytest.raises(
        ModelError, match=r"header of 103,809,024 bytes, which makes more than 33,554,432 for the model"
    ):
        check(tmp_path)
    # Nor do many files get around it.
    (tmp_path / WEIGHTS).unlink()
    names = [f"{number}.safetensors" for number in range(3)]
    for name in names:
        with (tmp_path / name).open("wb") as file:
            file.write((15 << 20).to_bytes(8, "little"))
            file.truncate(16 << 20)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict(zip("abc", names, strict=True))}))
    with pytest.raises(ModelError, match=r"2\.safetensors has a header of .* makes more than"):
        check(tmp_path)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F4"])
def test_a_dtype_that_cannot_be_trained_is_named(dtype: str, tmp_path: Path) -> None:
    size = {"F8_E4M3": 16, "F4": 8}[dtype]
    (tmp_path / WEIGHTS).write_bytes(safetensors({"a": tensor(dtype, [16], 0, size)}, bytes(size)))
    for ask in (lambda: layout_of(tmp_path / WEIGHTS), lambda: stored_dtype(ModelConfig(path=str(tmp_path)))):
        with pytest.raises(ModelError, match=rf"holds a as {dtype}.*BF16.*convert"):
            ask()


@pytest.mark.parametrize(
    "name", ["../other.safetensors", "/etc/passwd", "folder/a.safetensors", "a\0b.safetensors", ".."]
)
def test_an_index_names_files_beside_it_alone(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "model" / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelError, match=r"index\.json names '.*', which is no safetensors file beside it"):
        check(tmp_path / "model")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"weight_map":' + b'{"a":' * 20_000, "no index of weights"),
        (b'{"weight_map": {"a": ' + b"1" * 5000 + b"}}", "no index of weights"),
        (
            json.dumps({"weight_map": {str(n): f"{n}.safetensors" for n in range(10_001)}}).encode(),
            "names 10,001 files",
        ),
        (b'{"weight_map": {}}', "names 0 files"),
    ],
    ids=["deep", "long number", "files", "none"],
)
def test_an_index_that_cannot_be_true_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(ModelError, match=message):
        check_weight_files(ModelConfig(path=str(tmp_path)))


def test_an_index_longer_than_that_of_any_model_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ModelError, match=r"has 1,099,511,627,776 bytes, and no list of weights is as long"):
        check(tmp_path)


def test_what_is_no_regular_file_is_no_weight_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / WEIGHTS)
    (tmp_path / INDEX).symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="no weights can be loaded"):
        check(tmp_path)


class Trap:
    """Pickled, it makes a folder where it is opened."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_a_pickle_is_not_opened_and_how_to_convert_it_is_said(name: str, tmp_path: Path) -> None:
    folder, ran = write_tiny_model(tmp_path / "model"), tmp_path / "ran"
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Trap(str(ran))))
    for ask in (check, load):
        with pytest.raises(ModelError, match=rf"{name} is a pickle.*safetensors.*python -c"):
            ask(folder)
    assert not ran.exists()


def test_pickles_beside_safetensors_files_are_left_alone(tmp_path: Path) -> None:
    folder, ran = write_tiny_model(tmp_path / "model"), tmp_path / "ran"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "adapter_model.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(str(ran))))
    load(folder)
    assert not ran.exists()


def test_an_adapter_is_not_put_on_a_model_unasked(tmp_path: Path) -> None:
    folder, ran = write_tiny_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "../other"})
    )
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(str(ran))))
    with pytest.raises(ModelError, match=r"has an adapter_config\.json.*Merge it"):
        load(folder)
    assert not ran.exists()


def test_a_config_cannot_name_other_weights_than_those_that_were_checked(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    honest = load_file(folder / WEIGHTS)
    save_file({name: value + 1 for name, value in honest.items()}, folder / "other.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    loaded = load(folder).state_dict()
    name = next(iter(honest))
    assert torch.equal(loaded[name], honest[name].float())


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_config_names_no_kernel_of_the_hub_unless_its_code_is_trusted(
    key: str, is_nested: bool, tmp_path: Path
) -> None:
    text = Qwen3_5TextConfig(num_hidden_layers=1).to_dict()
    nested = {"model_type": "qwen3_5", "text_config": text, key: {"text_config": "evil/kernel"}}
    config = nested if is_nested else text | {key: "evil/kernel"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def kernels(**settings: Any) -> set[str | None]:
        read = load_model_config(ModelConfig(path=str(tmp_path), **settings))
        every = (read, read.get_text_config())
        return {one._attn_implementation for one in every} | {one._experts_implementation for one in every}

    assert kernels() == {None}
    assert "evil/kernel" in kernels(trust_remote_code=True)
