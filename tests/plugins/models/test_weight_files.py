"""Weight files that are missing, broken, of another model or pickles are named; new ones load as any do."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import local_backend
from huggingface_hub import save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5TextConfig

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_models.architecture import load_model_config
from spurline_models.testing.inputs import write_tiny_model
from spurline_models.weight_files import (
    WeightFile,
    WeightStream,
    check_weight_files,
    layout_of,
    stored_dtype,
    write_weight_files,
)

Break = Callable[[Path], object]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def load(folder: Path) -> dict[str, Tensor]:
    """The weights of a backend that has loaded this folder."""
    return dict(local_backend(folder, run={"model": ModelConfig(path=str(folder))}).named_weights())


def cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def only(name: str, content: bytes) -> Break:
    def replace(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / name).write_bytes(content)

    return replace


def safetensors(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    """A file. length: what it says its header has, if not the truth."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def index_of(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"weight{number}": name for number, name in enumerate(shards)}}).encode()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(cut, r"model\.safetensors is truncated .*again", id="truncated"),
        pytest.param(only(WEIGHTS, b"garbage" * 99), r"model\.safetensors is truncated", id="garbage"),
        pytest.param(only(WEIGHTS, b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull", id="lfs pointer"),
        pytest.param(only(INDEX, b"{"), r"index\.json is not an index", id="broken index"),
        pytest.param(only(INDEX, b"[1]"), r"index\.json is not an index", id="index of another shape"),
        pytest.param(only(INDEX, index_of("a.bin")), "not safetensors", id="index of other files"),
        pytest.param(
            only(INDEX, index_of("a.safetensors", "b.safetensors")),
            r"names 2 files.* 2 .*a\.safetensors, b\.safetensors",
            id="missing shards",
        ),
        pytest.param(only("notes.txt", b""), r"(?s)model\.safetensors.*notes\.txt.*init: random", id="nothing"),
        pytest.param(only(WEIGHTS, safetensors({}, length=2**60)), "is truncated", id="header of an exabyte"),
        pytest.param(
            only(WEIGHTS, safetensors({"a": tensor("F32", [2], 0, 2**40)}, bytes(8))),
            "is truncated",
            id="beyond the end",
        ),
    ],
)
def test_a_broken_file_is_named_with_what_to_do(folder: Path, spoil: Break, message: str) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        check_weight_files(ModelConfig(path=str(folder)))


def test_a_dtype_that_cannot_be_trained_is_named(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).write_bytes(safetensors({"a": tensor("F8_E4M3", [16], 0, 16)}, bytes(16)))
    for ask in (lambda: layout_of(tmp_path / WEIGHTS), lambda: stored_dtype(ModelConfig(path=str(tmp_path)))):
        with pytest.raises(ModelError, match=r"holds a as F8_E4M3.*BF16"):
            ask()


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_weights_of_another_shape_are_named_with_both_shapes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_config(folder, hidden_size=64)
    with pytest.raises(ModelError, match=r"21 weights .* lm_head\.weight is \(259, 32\) in the files and \(259, 64\)"):
        load(folder)
    assert capsys.readouterr().err == "", "transformers prints no table besides"


def test_weights_without_a_place_are_told_and_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_config(folder, num_hidden_layers=1, layer_types=["full_attention"])
    load(folder)
    assert "11 weights of" in caplog.text
    assert "model.layers.1.input_layernorm.weight" in caplog.text


def stream_of(weights: dict[str, Tensor], order: int = 1) -> WeightStream:
    layout = {name: tensor.to("meta") for name, tensor in weights.items()}
    return WeightStream(layout, iter(list(weights.items())[::order]))


def random_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"embed": (40, 8), "norm": (8,), "big": (100, 8), "scale": (), "strided": (8, 16), "head": (40, 8)}
    weights = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    weights["strided"] = weights["strided"].t()
    return weights | {"count": torch.tensor([1 << 40])}


@pytest.mark.parametrize("max_file_bytes", [10**9, 1500, 1])
@pytest.mark.parametrize("order", [1, -1])
def test_files_have_the_names_and_the_contents_that_transformers_would_write(
    tmp_path: Path, max_file_bytes: int, order: int
) -> None:
    weights = random_weights()
    (tmp_path / "ours").mkdir()
    write_weight_files(tmp_path / "ours", stream_of(weights, order), torch.bfloat16, max_file_bytes)
    cast = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    plain = {name: tensor.contiguous() for name, tensor in cast.items()}
    (tmp_path / "theirs").mkdir()
    save_torch_state_dict(plain, tmp_path / "theirs", max_shard_size=max_file_bytes)
    ours, theirs = ({path.name for path in (tmp_path / whose).iterdir()} for whose in ("ours", "theirs"))
    assert ours == theirs
    for name in ours:
        if name.endswith(".json"):
            assert json.loads((tmp_path / "ours" / name).read_text()) == json.loads(
                (tmp_path / "theirs" / name).read_text()
            )
            continue
        one, other = (load_file(tmp_path / whose / name) for whose in ("ours", "theirs"))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)
        with safe_open(tmp_path / "ours" / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_no_tensor_is_asked_for_before_the_last_one_is_written(tmp_path: Path) -> None:
    weights = {f"weight_{number}": torch.full((50_000,), float(number)) for number in range(5)}

    def watched() -> Iterator[tuple[str, Tensor]]:
        for number, (name, tensor) in enumerate(weights.items()):
            written = sum(path.stat().st_size for path in tmp_path.iterdir())
            # But for the few bytes that a file object keeps.
            assert written >= number * 200_000 - io.DEFAULT_BUFFER_SIZE
            yield name, tensor

    stream = WeightStream(stream_of(weights).layout, watched())
    write_weight_files(tmp_path, stream, torch.float32, 400_000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_file_that_lacks_a_tensor_or_gets_another_shape_is_never_taken_for_whole(tmp_path: Path) -> None:
    layout = {"a": torch.empty(2, 3, device="meta"), "b": torch.empty(4, device="meta")}
    with pytest.raises(AssertionError, match=r"lacks.*'b'"), WeightFile(tmp_path / "one", layout) as file:
        file.put("a", torch.zeros(2, 3))
    with pytest.raises(AssertionError, match="planned"), WeightFile(tmp_path / "two", layout) as file:
        file.put("a", torch.zeros(3, 2))


class Trap:
    """Pickled, it makes a folder where it is opened."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize("name", ["pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_a_pickle_is_not_opened_and_how_to_convert_it_is_said(name: str, tmp_path: Path) -> None:
    folder, ran = write_tiny_model(tmp_path / "model"), tmp_path / "ran"
    for file in (name, "training_args.bin", "optimizer.pt", "adapter_model.bin"):
        (folder / file).write_bytes(pickle.dumps(Trap(str(ran))))
    # Beside safetensors files, pickles are left alone.
    load(folder)
    (folder / WEIGHTS).unlink()
    for ask in (lambda: check_weight_files(ModelConfig(path=str(folder))), lambda: load(folder)):
        with pytest.raises(ModelError, match=r" is a pickle.*python -c"):
            ask()
    assert not ran.exists()


def test_a_config_cannot_name_other_weights_than_those_that_were_checked(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    honest = load_file(folder / WEIGHTS)
    save_file({name: value + 1 for name, value in honest.items()}, folder / "other.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": "other.safetensors"}))
    loaded = load(folder)
    name = next(iter(honest))
    assert torch.equal(loaded[name], honest[name].float())


def test_an_adapter_is_not_put_on_a_model_unasked(tmp_path: Path) -> None:
    folder, ran = write_tiny_model(tmp_path / "model"), tmp_path / "ran"
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": "../other"})
    )
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap(str(ran))))
    with pytest.raises(ModelError, match="adapter_config"):
        load(folder)
    assert not ran.exists()


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
