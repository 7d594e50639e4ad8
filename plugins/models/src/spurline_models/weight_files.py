"""The weight files of a Hugging Face folder: are those that shall be loaded there and whole, and writing new ones.

The check reads headers and file lists alone, so that `spurline plan` can afford it for any size. Nothing in them is
believed before it is compared with the file, and no pickle is opened: files may come from anybody. Writing takes one
tensor at a time, in any order: sizes are planned beforehand from names and shapes, so no more than that tensor is held.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spurline.config.run_config import ModelConfig
from spurline.errors import CheckpointWriteError, ModelError, listing
from spurline.tensor_files import BLOCK_BYTES, Values, header_of
from spurline_models.adapters.adapter_weights import SETTINGS_FILE
from spurline_text.hub import finding, refuse_adapter

_CANDIDATES = ("model.safetensors", "model.safetensors.index.json")
"""In the order in which transformers looks for them."""
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
"""Weights in the form of `torch.save`."""

_MAX_INDEX_BYTES = 64 << 20
_MAX_FILES = 10_000
_MAX_HEADER_BYTES = 32 << 20
"""Of all files of a model together. The largest models there are have 10 MB of headers, in a few hundred files."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in safetensors files."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The inverse of `DTYPES`."""
_OTHER_DTYPE_NAMES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
"""Of those that no model's weights have, but an optimizer's state may."""

_LFS = b"version https://git-lfs"
_FETCH = "Copy or download it again."
_LENGTH_BYTES = 8
"""What a safetensors file begins with: the length of its header."""


def check_weight_files(model: ModelConfig) -> None:
    """Raise ModelError naming a file that is missing, broken or a pickle. The hub's client checks models on the hub."""
    folder = Path(model.path)
    if model.init == "random" or not folder.is_dir():
        return
    refuse_adapter("model.path", model.path)
    if (folder / SETTINGS_FILE).is_file():
        raise ModelError(
            f"model.path: {folder} has an {SETTINGS_FILE}: it is an adapter, which transformers would put on another "
            "model. Merge it into its model, and set model.path to that; or remove the file if the weights beside it "
            "are whole."
        )
    found = next((folder / name for name in _CANDIDATES if (folder / name).is_file()), None)
    if found is None:
        raise ModelError(_without_weights(folder))
    paths = shards_of(found) if found.suffix == ".json" else [found]
    headers = 0
    for path in paths:
        headers += _checked_header(path)
        if headers > _MAX_HEADER_BYTES:
            raise ModelError(
                f"model.path: {path} has a header of {_header_bytes(path):,} bytes, which makes more than "
                f"{_MAX_HEADER_BYTES:,} for the model: no list of weights is as long. Get the model from its makers."
            )
    for path in paths:
        _check_readable(path)


def _without_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        convert = (
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f"[kind.from_pretrained('{folder}').save_pretrained('{folder}-safetensors') for kind in (M, T)]"
        )
        return (
            f"model.path: {folder / pickled[0]} is a pickle, which can run code when it is opened, and {folder} has no "
            "safetensors files. Use a copy of the model in safetensors. Where you trust its makers make one, and set "
            f'model.path to it: python -c "{convert}"'
        )
    files = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "(empty)"
    return (
        f"model.path: no weights can be loaded from folder {folder}: it has none of {', '.join(_CANDIDATES)}.\n"
        f"Files there: {files}.\nCopy or download its weights into it, or set model.path to one that has them. "
        "To train this architecture from scratch set model.init: random."
    )


def safetensors_files(model: ModelConfig) -> list[Path]:
    """The safetensors files of a model, downloaded where it is not a folder; none where it has others.

    Raises ModelError for files that are missing or broken.
    """
    check_weight_files(model)
    folder = Path(model.path)
    if not folder.is_dir():
        with finding("model.path", model.path):
            folder = _download(model)
    found = next((folder / name for name in _CANDIDATES if (folder / name).is_file()), None)
    if found is None:
        return []
    return shards_of(found) if found.suffix == ".json" else [found]


def _download(model: ModelConfig) -> Path:
    """The folder of a model in the hub's cache. Repositories may hold the weights once more, under other names."""
    folder = Path(snapshot_download(model.path, revision=model.revision, allow_patterns=list(_CANDIDATES)))
    whole, index = (folder / name for name in _CANDIDATES)
    if index.is_file() and not whole.is_file():
        snapshot_download(model.path, revision=model.revision, allow_patterns=_names_in(index))
    return folder


def stored_dtype(model: ModelConfig) -> torch.dtype:
    """In which the files hold the weights; fp32 where they hold several, or are no safetensors, or there are none."""
    found: set[torch.dtype] = set()
    for path in [] if model.init == "random" else safetensors_files(model):
        found |= {tensor.dtype for tensor in layout_of(path).values()}
    floating = {dtype for dtype in found if dtype.is_floating_point}
    return floating.pop() if len(floating) == 1 else torch.float32


def layout_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on device `meta`, from its header. Raises ModelError for a dtype without a
    place in `DTYPES`."""
    with safe_open(path, "pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {key: _without_memory(path, key, value) for key, value in slices.items()}


def _without_memory(path: Path, name: str, tensor: Any) -> Tensor:
    dtype = DTYPES.get(tensor.get_dtype())
    if dtype is None:
        raise ModelError(
            f"{path} holds {name} as {tensor.get_dtype()}. Weights can be trained that are {listing(DTYPES)}: convert "
            "the model to BF16 first."
        )
    return torch.empty(tensor.get_shape(), dtype=dtype, device="meta")


def shards_of(index: Path) -> list[Path]:
    """The files that an index names, which lie beside it. Raises ModelError."""
    names = _names_in(index)
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"model.path: {index} names {len(names)} files, of which {', '.join(missing[:3])}{more} "
            f"{'is' if len(missing) == 1 else 'are'} not in {index.parent}. Copy or download the rest."
        )
    return [index.parent / name for name in names]


def _names_in(index: Path) -> list[str]:
    if index.stat().st_size > _MAX_INDEX_BYTES:
        raise ModelError(
            f"model.path: {index} has {index.stat().st_size:,} bytes, and no list of weights is as long (at most "
            f"{_MAX_INDEX_BYTES:,}). Get the model from its makers."
        )
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in content["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"model.path: {index} is no index of weights ({type(error).__name__}: {str(error)[:200]}). {_FETCH}"
        ) from error
    if not 0 < len(names) <= _MAX_FILES:
        raise ModelError(
            f"model.path: {index} names {len(names):,} files, and a model has 1 to {_MAX_FILES:,}. {_FETCH}"
        )
    for name in names:
        # A file elsewhere was not given with the model, and is not to be read in its name.
        if Path(name).name != name or not name.isprintable() or not name.endswith(".safetensors"):
            raise ModelError(
                f"model.path: {index} names {name!r}, which is no safetensors file beside it. Get the model from its "
                "makers, or put its files into one folder and name them without folders."
            )
    return names


def _checked_header(path: Path) -> int:
    """Bytes of a safetensors file's header, which lies within the file. Raises ModelError."""
    size = path.stat().st_size
    if size == 0:
        raise ModelError(f"model.path: {path} is empty. {_FETCH}")
    with path.open("rb") as file:
        if file.read(len(_LFS)) == _LFS:
            pointer = "is a pointer of Git LFS and not the weights: run `git lfs pull` in that folder."
            raise ModelError(f"model.path: {path} {pointer} {_FETCH}")
    header = _header_bytes(path)
    if header > size - _LENGTH_BYTES:
        raise ModelError(
            f"model.path: {path} is truncated or no safetensors file (its first bytes announce a header of {header:,} "
            f"bytes; {size:,} bytes). {_FETCH}"
        )
    return header


def _header_bytes(path: Path) -> int:
    """As the file says, true or not."""
    with path.open("rb") as file:
        return int.from_bytes(file.read(_LENGTH_BYTES), "little")


def _check_readable(path: Path) -> None:
    """The library refuses headers that contradict themselves or the file: places, shapes, dtypes."""
    try:
        with safe_open(path, "pt") as _:
            pass
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise ModelError(
            f"model.path: {path} is truncated or no safetensors file ({str(error)[:300]}; {size:,} bytes). {_FETCH}"
        ) from error


def values_of_tensor(tensor: Tensor) -> Values:
    """A tensor's values as a file holds them, copied from a device block by block.

    Raises CheckpointWriteError for a dtype that no file can hold.
    """

    def blocks() -> Iterator[memoryview]:
        for block in tensor.detach().reshape(-1).split(BLOCK_BYTES // tensor.element_size()):
            yield block.cpu().view(torch.uint8).numpy().data

    name = DTYPE_NAMES.get(tensor.dtype) or _OTHER_DTYPE_NAMES.get(tensor.dtype)
    if name is None:
        raise CheckpointWriteError(f"a tensor is {tensor.dtype}, which safetensors files cannot hold")
    return Values(name, tensor.shape, tensor.element_size(), tensor.nbytes, blocks)


@dataclass(frozen=True)
class WeightStream:
    """Weights under Hugging Face names, one at a time.

    layout: name -> tensor on device `meta` with its shape and dtype. tensors: (name, tensor) for every name of the
    layout once, in any order.
    """

    layout: Mapping[str, Tensor]
    tensors: Iterator[tuple[str, Tensor]]


def write_weight_files(folder: Path, stream: WeightStream, dtype: torch.dtype, max_file_bytes: int) -> None:
    """Write safetensors files, and the index where there are several, into this folder; holds one tensor at a time.

    dtype: of all floating point weights. max_file_bytes: of tensors in one file; a larger tensor has a file of its own.
    """
    plan = FilePlan.of(stream.layout, dtype, max_file_bytes)
    with ExitStack() as stack:
        files = {name: stack.enter_context(WeightFile(folder / name, plan.files[name])) for name in plan.files}
        for name, tensor in stream.tensors:
            files[plan.file_of[name]].put(name, tensor)
    plan.write_index(folder)


@dataclass(frozen=True)
class FilePlan:
    """Which weight goes to which file, named as transformers names them.

    files: file name -> its layout, in the dtype of the files. file_of: weight -> file name.
    """

    files: Mapping[str, Mapping[str, Tensor]]
    file_of: Mapping[str, str]
    total_bytes: int

    @classmethod
    def of(cls, layout: Mapping[str, Tensor], dtype: torch.dtype, max_file_bytes: int) -> FilePlan:
        """dtype: of floating point weights; whole numbers stay what they are."""
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in layout.items()}
        split = split_torch_state_dict_into_shards(cast, max_shard_size=max_file_bytes)
        files = {file: {name: cast[name] for name in names} for file, names in split.filename_to_tensors.items()}
        return cls(files, split.tensor_to_filename, split.metadata["total_size"])

    def write_index(self, folder: Path) -> None:
        """Beside several files; a single one needs none."""
        if len(self.files) == 1:
            return
        content = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(self.file_of.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class WeightFile:
    """A safetensors file that is written tensor by tensor, in any order; a context that closes it.

    layout: name -> tensor on device `meta` with the shape and dtype that the file has.
    """

    def __init__(self, path: Path, layout: Mapping[str, Tensor]):
        self._layout = layout
        self._places: dict[str, int] = {}
        self._path = path
        end = 0
        # In the order of safetensors itself, the widest dtypes first: every tensor begins at a multiple of its width.
        ordered = dict(sorted(layout.items(), key=lambda item: (-item[1].element_size(), item[0])))
        for name, tensor in ordered.items():
            self._places[name], end = end, end + tensor.nbytes
        header = header_of({name: values_of_tensor(tensor) for name, tensor in ordered.items()}, {"format": "pt"})
        self._data_begin = len(header)
        self._missing = set(layout)
        self._file = path.open("xb")
        self._file.write(header)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from any device, in the dtype of the layout."""
        planned = self._layout[name]
        assert tensor.shape == planned.shape, f"{name} has shape {tensor.shape}, planned was {planned.shape}"
        values = tensor.detach().to("cpu", planned.dtype).contiguous().view(-1)
        self._missing.remove(name)
        self._file.seek(self._data_begin + self._places[name])
        values.view(torch.uint8).numpy().tofile(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        assert error is not None or not self._missing, f"{self._path} lacks {sorted(self._missing)[:3]}"
