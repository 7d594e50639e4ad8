"""Check the weight files of a Hugging Face folder, and write new ones.

The check reads only headers and indexes, and opens no pickle. Tensors are written one at a time, in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spurline.config.run_config import ModelConfig
from spurline.errors import CheckpointWriteError, ModelError, listing
from spurline.tensor_files import BLOCK_BYTES, Values, header_of
from spurline_text.hub import finding, refuse_adapter

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_FETCH = "Copy or download it again (in a Git clone with `git lfs pull`)."

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors files."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def check_weight_files(model: ModelConfig) -> None:
    """Raise ModelError if a file of a model's folder is missing, broken or a pickle."""
    folder = Path(model.path)
    if model.init == "random" or not folder.is_dir():
        return
    refuse_adapter("model.path", model.path)
    paths = _files_in(folder)
    if not paths:
        raise ModelError(_without_weights(folder))
    for path in paths:
        try:
            # This reads the header and checks the file's length.
            safe_open(path, "pt")
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"model.path: {path} is truncated or not a safetensors file ({str(error)[:300]}; "
                f"{path.stat().st_size:,} bytes). {_FETCH}"
            ) from error


def _without_weights(folder: Path) -> str:
    pickled = sorted(path.name for pattern in _PICKLED for path in folder.glob(pattern))
    if pickled:
        convert = (
            "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
            f"[kind.from_pretrained('{folder}').save_pretrained('{folder}-safetensors') for kind in (M, T)]"
        )
        return (
            f"model.path: {folder / pickled[0]} is a pickle, which can run code when it is opened, and {folder} has no "
            "safetensors files. Use a copy of the model in safetensors. If you trust its makers, convert it and "
            f'set model.path to the result: python -c "{convert}"'
        )
    files = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "(empty)"
    return (
        f"model.path: no weights can be loaded from folder {folder}: it has neither {_WHOLE} nor {_INDEX}.\n"
        f"Files there: {files}.\nCopy or download the weights into it, or set model.path to a folder that has them. "
        "To train this architecture from scratch, set model.init: random."
    )


def safetensors_files(model: ModelConfig) -> list[Path]:
    """Return a model's safetensors files, or [] if a hub model has none. The files of a hub model are downloaded.

    Raises:
        ModelError: If files are missing or broken.
    """
    check_weight_files(model)
    folder = Path(model.path)
    if not folder.is_dir():
        with finding("model.path", model.path):
            folder = Path(snapshot_download(model.path, revision=model.revision, allow_patterns=[_WHOLE, _INDEX]))
            # Other weight files on the hub are not downloaded, since they may be a second copy of the weights.
            if (folder / _INDEX).is_file() and not (folder / _WHOLE).is_file():
                names = _names_in(folder / _INDEX)
                snapshot_download(model.path, revision=model.revision, allow_patterns=names)
    return _files_in(folder)


def _files_in(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if (folder / _WHOLE).is_file():
        return [folder / _WHOLE]
    if not index.is_file():
        return []
    names = _names_in(index)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"model.path: {index} names {len(names)} files, and {len(missing)} of them are not in {folder}: "
            f"{', '.join(missing[:3])}. Copy or download the rest."
        )
    return [folder / name for name in names]


def stored_dtype(model: ModelConfig) -> torch.dtype:
    """Return the dtype of the floating point weights in a model's files, or fp32 if it is not the same for all."""
    files = [] if model.init == "random" else safetensors_files(model)
    tensors = (tensor for path in files for tensor in layout_of(path).values())
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else torch.float32


def slices_of(paths: Iterable[Path]) -> dict[str, Any]:
    """Return the tensors of safetensors files by name, as slices whose values are read when they are indexed."""
    files = [safe_open(path, "pt") for path in paths]
    return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118


def layout_of(path: Path) -> dict[str, Tensor]:
    """Read the header of a safetensors file, and return its tensors on device `meta`.

    Raises:
        ModelError: If values are quantized.
    """
    layout: dict[str, Tensor] = {}
    for name, part in slices_of([path]).items():
        kind = part.get_dtype()
        if kind not in DTYPES or kind.startswith("F8"):
            raise ModelError(f"{path} holds {name} as {kind}. Convert the model to BF16 first.")
        layout[name] = torch.empty(part.get_shape(), dtype=DTYPES[kind], device="meta")
    return layout


def _names_in(index: Path) -> list[str]:
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in content["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"model.path: {index} is not an index of weights ({type(error).__name__}: {str(error)[:200]}). {_FETCH}"
        ) from error
    if not all(name.endswith(".safetensors") for name in names):
        raise ModelError(f"model.path: {index} names files that are not safetensors: {listing(names[:4])}.")
    return names


def values_of_tensor(tensor: Tensor) -> Values:
    """Return a tensor's values for a safetensors file. They are copied from the device block by block.

    Raises:
        CheckpointWriteError: If safetensors files cannot hold the dtype.
    """

    def blocks() -> Iterator[memoryview]:
        for block in tensor.detach().reshape(-1).split(BLOCK_BYTES // tensor.element_size()):
            yield block.cpu().view(torch.uint8).numpy().data

    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise CheckpointWriteError(f"a tensor is {tensor.dtype}, which safetensors files cannot hold")
    return Values(name, tensor.shape, tensor.element_size(), tensor.nbytes, blocks)


@dataclass(frozen=True)
class WeightStream:
    """Weights under Hugging Face names, one at a time.

    Attributes:
        layout: Tensors on device `meta` by name, with the shape and dtype of the weights.
        tensors: Pairs (name, tensor) in any order. Each name of the layout appears once.
    """

    layout: Mapping[str, Tensor]
    tensors: Iterator[tuple[str, Tensor]]


def write_weight_files(folder: Path, stream: WeightStream, dtype: torch.dtype, max_file_bytes: int) -> None:
    """Write safetensors files into a folder, and an index if there are several, with one tensor in memory at a time.

    Floating point weights get this dtype. The tensors of a file have at most `max_file_bytes` bytes, except that a
    larger tensor gets its own file.
    """
    plan = FilePlan.of(stream.layout, dtype, max_file_bytes)
    with ExitStack() as stack:
        files = {name: stack.enter_context(WeightFile(folder / name, plan.files[name])) for name in plan.files}
        for name, tensor in stream.tensors:
            files[plan.file_of[name]].put(name, tensor)
    plan.write_index(folder)


@dataclass(frozen=True)
class FilePlan:
    """The files that weights are written to, named as transformers names them.

    Attributes:
        files: The layout of each file by file name, with the dtypes to write.
        file_of: The file name of each weight.
        total_bytes: Size of all weights.
    """

    files: Mapping[str, Mapping[str, Tensor]]
    file_of: Mapping[str, str]
    total_bytes: int

    @classmethod
    def of(cls, layout: Mapping[str, Tensor], dtype: torch.dtype, max_file_bytes: int) -> FilePlan:
        """Plan the files of these weights, with floating point weights in this dtype."""
        cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in layout.items()}
        split = split_torch_state_dict_into_shards(cast, max_shard_size=max_file_bytes)
        files = {file: {name: cast[name] for name in names} for file, names in split.filename_to_tensors.items()}
        return cls(files, split.tensor_to_filename, split.metadata["total_size"])

    def write_index(self, folder: Path) -> None:
        """Write the index if there are several files."""
        if len(self.files) == 1:
            return
        content = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(self.file_of.items()))}
        (folder / _INDEX).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class WeightFile:
    """A context that writes a new safetensors file tensor by tensor, in any order.

    `layout` has tensors on device `meta` by name, with the shapes and dtypes to write.
    """

    def __init__(self, path: Path, layout: Mapping[str, Tensor]):
        self._layout = layout
        self._places: dict[str, int] = {}
        self._path = path
        end = 0
        # As in safetensors, the widest dtypes come first, so that each tensor begins at a multiple of its element size.
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._file.close()
        assert error is not None or not self._missing, f"{self._path} lacks {sorted(self._missing)[:3]}"
