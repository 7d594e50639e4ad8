"""Write safetensors files from front to back, hash them while writing, and force them to disk.

An array or tensor of any library is passed as `Values`, which yield its bytes block by block. The content of a file is
therefore never copied as a whole. Tensors with the widest dtypes come first, as in the library safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spurline.digests import FileDigest, HashedFile

BLOCK_BYTES = 64 << 20
"""Number of bytes that are copied from a device, hashed and written at a time."""

_DTYPES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
}
"""The safetensors name of each numpy dtype."""


@dataclass(frozen=True)
class Values:
    """The dtype, shape and bytes of one tensor in a file.

    Attributes:
        dtype: The safetensors name of the dtype.
        shape: Shape of the tensor.
        item_bytes: Bytes of one value.
        num_bytes: Bytes of all values.
        blocks: Returns an iterator over all bytes in little-endian order, as contiguous memoryviews of single bytes.
    """

    dtype: str
    shape: Sequence[int]
    item_bytes: int
    num_bytes: int
    blocks: Callable[[], Iterable[memoryview]]


def write_tensor_file(path: Path, tensors: Mapping[str, Values], metadata: Mapping[str, str]) -> FileDigest:
    """Write a new file, force it to disk, and return its digest. Raises OSError."""
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].item_bytes, item[0])))
    with HashedFile(path) as file:
        file.write(header_of(ordered, metadata))
        for values in ordered.values():
            for block in values.blocks():
                file.write(block)
    return file.digest


def header_of(tensors: Mapping[str, Values], metadata: Mapping[str, str]) -> bytes:
    """Return the header of a file with these tensors in this order. Its first 8 bytes are the length of the rest."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, values in tensors.items():
        begin, end = end, end + values.num_bytes
        entries[name] = {"dtype": values.dtype, "shape": list(values.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    # The values must begin at a multiple of 8 bytes, the size of the widest dtype.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def can_hold(array: NDArray[np.generic]) -> bool:
    """Return whether a safetensors file can store the array's dtype."""
    return array.dtype.name in _DTYPES


def values_of_array(array: NDArray[np.generic]) -> Values:
    """Return the values of an array, for which `can_hold` must be true."""

    def blocks() -> Iterator[memoryview]:
        flat = np.ascontiguousarray(array).reshape(-1)
        little = flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)
        for begin in range(0, len(little), BLOCK_BYTES):
            yield little[begin : begin + BLOCK_BYTES].data

    return Values(_DTYPES[array.dtype.name], array.shape, array.itemsize, array.nbytes, blocks)
