"""The weight files of a Hugging Face folder: are those that shall be loaded there and whole, and writing new ones.

The check reads headers and file lists alone, so that `spurline plan` can afford it for any size. Writing takes one
tensor at a time, in any order: sizes are planned beforehand from names and shapes, so no more than that tensor is held.
"""

from __future__ import annotations

import json
import zipfile
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
from spurline.data.hub import finding
from spurline.errors import ModelError

_CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which transformers looks for them."""

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

_LFS = b"version https://git-lfs"
_PICKLE = b"\x80"
_FETCH = "Copy or download it again."


def check_weight_files(model: ModelConfig) -> None:
    """Raise ModelError naming a file that is missing or broken. Models on the hub are checked by its client."""
    folder = Path(model.path)
    if model.init == "random" or not folder.is_dir():
        return
    found = next((folder / name for name in _CANDIDATES if (folder / name).is_file()), None)
    if found is None:
        files = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "(empty)"
        raise ModelError(
            f"model.path: no weights can be loaded from folder {folder}: it has none of {', '.join(_CANDIDATES)}.\n"
            f"Files there: {files}.\nCopy or download its weights into it, or set model.path to one that has them. "
            "To train this architecture from scratch set model.init: random."
        )
    for path in shards_of(found) if found.suffix == ".json" else [found]:
        problem = _problem_of(path)
        if problem:
            raise ModelError(f"model.path: {path} {problem} {_FETCH}")


def safetensors_files(model: ModelConfig) -> list[Path]:
    """The safetensors files of a model, downloaded where it is not a folder; none where it has others.

    Raises ModelError for files that are missing or broken.
    """
    check_weight_files(model)
    folder = Path(model.path)
    if not folder.is_dir():
        with finding("model.path", model.path):
            patterns = ["*.json", "*.safetensors"]
            folder = Path(snapshot_download(model.path, revision=model.revision, allow_patterns=patterns))
    index = folder / "model.safetensors.index.json"
    return shards_of(index) if index.is_file() else [*folder.glob("model.safetensors")]


def stored_dtype(model: ModelConfig) -> torch.dtype:
    """In which the files hold the weights; fp32 where they hold several, or are no safetensors, or there are none."""
    found: set[torch.dtype] = set()
    for path in [] if model.init == "random" else safetensors_files(model):
        found |= {tensor.dtype for tensor in layout_of(path).values()}
    floating = {dtype for dtype in found if dtype.is_floating_point}
    return floating.pop() if len(floating) == 1 else torch.float32


def layout_of(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on device `meta`, from its header."""
    with safe_open(path, "pt") as file:
        slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
        return {
            key: torch.empty(value.get_shape(), dtype=DTYPES[value.get_dtype()], device="meta")
            for key, value in slices.items()
        }


def shards_of(index: Path) -> list[Path]:
    """The files that an index names."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in content["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model.path: {index} is no index of weights ({type(error).__name__}: {error}). {_FETCH}"
        ) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"model.path: {index} names {len(names)} files, of which {', '.join(missing[:3])}{more} "
            f"{'is' if len(missing) == 1 else 'are'} not in {index.parent}. Copy or download the rest."
        )
    return [index.parent / name for name in names]


def _problem_of(path: Path) -> str:
    """What is wrong with a file of weights, as the end of a sentence that begins with its name; empty for nothing."""
    size = path.stat().st_size
    if size == 0:
        return "is empty."
    with path.open("rb") as file:
        begin = file.read(len(_LFS))
    if begin == _LFS:
        return "is a pointer of Git LFS and not the weights: run `git lfs pull` in that folder."
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as _:
                return ""
        except (SafetensorError, OSError) as error:
            return f"is truncated or no safetensors file ({error}; {size:,} bytes)."
    if zipfile.is_zipfile(path) or (begin[:1] == _PICKLE and not begin.startswith(b"PK")):
        return ""
    return f"is truncated or was not written by torch.save ({size:,} bytes)."


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
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # In the order of safetensors itself, the widest dtypes first: every tensor begins at a multiple of its width.
        for name, tensor in sorted(layout.items(), key=lambda item: (-item[1].element_size(), item[0])):
            self._places[name], end = end, end + tensor.nbytes
            offsets = [self._places[name], end]
            header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data_begin = 8 + len(text)
        self._missing = set(layout)
        self._file = path.open("xb")
        self._file.write(len(text).to_bytes(8, "little") + text)

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
