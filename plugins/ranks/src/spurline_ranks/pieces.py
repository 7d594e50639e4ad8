"""Write tensors that are divided among many processes, and read any part of them in any number of processes.

A *piece* is a part of one tensor: a rectangular box, or a range of a box's values in row-major order. Every process
writes its pieces into its own safetensors files, such as `rank-00003.part-001.safetensors`, and hashes the files
meanwhile. The metadata of a file gives the position of each piece in its tensor. A reader makes an index of all files,
checks that no value is missing, and reads the boxes that it needs.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # no public function does this

from spurline.digests import FileDigest
from spurline.errors import DamagedCheckpointError
from spurline.tensor_files import Values, write_tensor_file
from spurline_models.weight_files import DTYPES, values_of_tensor

PART_BYTES = 2 << 30
"""Maximum bytes of values in one file. A larger piece gets a file of its own."""

_METADATA = "spurline_pieces"

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor: its first position in each dimension, and its shape."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the box of a whole tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> Shape:
        """One past the last position in each dimension."""
        return tuple(map(sum, zip(self.offset, self.shape, strict=True)))

    def common(self, other: Box) -> Box | None:
        """Return the intersection of both boxes, or None."""
        begin = tuple(map(max, zip(self.offset, other.offset, strict=True)))
        end = tuple(map(min, zip(self.end, other.end, strict=True)))
        if any(low >= high for low, high in zip(begin, end, strict=True)):
            return None
        return Box(begin, tuple(high - low for low, high in zip(begin, end, strict=True)))

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices that cut this box out of a tensor that holds the outer box."""
        begin = [here - there for here, there in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(low, low + size) for low, size in zip(begin, self.shape, strict=True))


@dataclass(frozen=True)
class Piece:
    """A part of a tensor, to write into a file.

    Attributes:
        key: The name of the tensor.
        shape: The shape of the whole tensor.
        box: The box that the values come from.
        values: All values of the box in its shape if `span` is None, else a vector of the values in the span.
        span: The range of the box's values in row-major order. If None, the piece has all values.
    """

    key: str
    shape: Shape
    box: Box
    values: Tensor
    span: tuple[int, int] | None = None


def held_box(tensor: Tensor) -> Box:
    """Return the box of a tensor that this process holds: the local part of a DTensor, or the whole tensor."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    assert tuple(shape) == tensor.to_local().shape, (shape, tensor.to_local().shape, tensor.placements)
    return Box(tuple(offset), tuple(shape))


def held_values(tensor: Tensor) -> Tensor:
    """Return the values in the `held_box` of a tensor, as a tensor that shares its memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def held_pieces(tensors: Mapping[str, Tensor], *, first: bool) -> Iterator[Piece]:
    """Yield the pieces that this process writes. All processes together write each value once.

    Args:
        tensors: The tensors of this process, by key.
        first: Whether this process writes the tensors that are the same in all processes.
    """
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            copies = [index for index, placement in enumerate(tensor.placements) if placement.is_replicate()]
            writes = all(mesh.get_local_rank(index) == 0 for index in copies)
        else:
            writes = first
        if writes:
            yield Piece(key, tuple(tensor.shape), held_box(tensor), held_values(tensor))


def write_pieces(
    folder: Path, rank: int, pieces: Iterable[Piece], part_bytes: int = PART_BYTES
) -> dict[str, FileDigest]:
    """Write the pieces of one process file by file, and force each file to disk.

    Returns:
        The digests of the files by name.

    Raises:
        OSError: If files cannot be written.
    """
    digests: dict[str, FileDigest] = {}
    for number, part in enumerate(_parts(pieces, part_bytes)):
        name = f"rank-{rank:05d}.part-{number:03d}.safetensors"
        digests[name] = _write_part(folder / name, part)
    return digests


def _parts(pieces: Iterable[Piece], part_bytes: int) -> Iterator[list[Piece]]:
    """Yield the pieces of each file."""
    part: list[Piece] = []
    filled = 0
    for piece in pieces:
        if not piece.values.numel():
            continue
        if part and filled + piece.values.nbytes > part_bytes:
            yield part
            part, filled = [], 0
        part.append(piece)
        filled += piece.values.nbytes
    if part:
        yield part


def _write_part(path: Path, pieces: list[Piece]) -> FileDigest:
    stored: dict[str, Values] = {}
    places: dict[str, Any] = {}
    for number, piece in enumerate(pieces):
        name = piece.key if piece.key not in stored else f"{piece.key}~{number}"
        stored[name] = values_of_tensor(piece.values)
        span = piece.span or (0, piece.box.num_values)
        places[name] = [piece.key, piece.shape, piece.box.offset, piece.box.shape, span]
    return write_tensor_file(path, stored, {_METADATA: json.dumps(places)})


@dataclass(frozen=True)
class StoredPiece:
    """A piece in a file. `name` is the name of its values in the safetensors file."""

    file: str
    name: str
    box: Box
    span: tuple[int, int]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor whose values may be spread over several files."""

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[StoredPiece, ...]

    @property
    def on_meta(self) -> Tensor:
        """The tensor on device `meta`: its shape and dtype without values."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


@dataclass(frozen=True)
class PieceIndex:
    """The tensors in the files of a folder, by key."""

    folder: Path
    tensors: Mapping[str, StoredTensor]
    _opened: dict[str, Any] = field(default_factory=dict[str, Any], repr=False, compare=False)
    """Open files, by name. An index with open files cannot be sent to another process."""

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the headers of the files. Raises DamagedCheckpointError if files are damaged or missing."""
        found: dict[str, list[tuple[Shape, torch.dtype, StoredPiece]]] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            for key, shape, dtype, piece in _stored_pieces(path):
                found.setdefault(key, []).append((shape, dtype, piece))
        tensors: dict[str, StoredTensor] = {}
        for key, entries in found.items():
            shape, dtype, _ = entries[0]
            pieces = tuple(piece for _, _, piece in entries)
            # A wrong count shows that a file is missing or superfluous. Digests show that a file has changed.
            held, needed = sum(piece.span[1] - piece.span[0] for piece in pieces), math.prod(shape)
            if held != needed:
                files = ", ".join(sorted({piece.file for piece in pieces}))
                raise DamagedCheckpointError(
                    f"{folder} is damaged: {files} hold {held} values of {key}, which has {needed}."
                )
            tensors[key] = StoredTensor(shape, dtype, pieces)
        return cls(folder, tensors)

    def read(self, key: str, box: Box) -> Tensor:
        """Read a box of a tensor onto the CPU."""
        result = torch.empty(box.shape, dtype=self.tensors[key].dtype)
        self._read_into(result, key, box)
        return result

    def read_span(self, key: str, box: Box, begin: int, end: int) -> Tensor:
        """Read a range of the values of a box, in row-major order, as a vector on the CPU."""
        result = torch.empty(end - begin, dtype=self.tensors[key].dtype)
        filled = 0
        for part in _boxes_of_span(box, begin, end):
            self._read_into(result[filled : filled + part.num_values].view(part.shape), key, part)
            filled += part.num_values
        return result

    def fill(self, target: Tensor, key: str) -> None:
        """Read the part of `target` that this process holds. `target` has the stored tensor's shape and dtype."""
        local, box = held_values(target), held_box(target)
        if local.device.type == "cpu":
            self._read_into(local, key, box)
        else:
            local.copy_(self.read(key, box))

    def _read_into(self, result: Tensor, key: str, box: Box) -> None:
        """Read a box into `result`, a tensor on the CPU with the shape of the box."""
        stored = self.tensors[key]
        missing = box.num_values
        for piece in stored.pieces:
            if piece.box.common(box) is None:
                continue
            values = self._values(piece)
            begin = 0
            for part in _boxes_of_span(piece.box, *piece.span):
                common = part.common(box)
                if common is not None:
                    there = values[begin : begin + part.num_values].view(part.shape)
                    result[common.slices_in(box)] = there[common.slices_in(part)]
                    missing -= common.num_values
                begin += part.num_values
        assert missing == 0, (key, box, missing)

    def read_like(self, key: str, like: Tensor) -> Tensor:
        """Return a stored tensor as a DTensor with the sharding and the device of `like`.

        If `like` is not a DTensor, or has another shape, the whole tensor is read onto the CPU.
        """
        stored = self.tensors[key]
        if not isinstance(like, DTensor) or stored.shape != like.shape:
            return self.read(key, Box.whole(stored.shape))
        # `DTensor.from_local` would move offloaded weights to the device of the mesh.
        result = torch.empty_like(like, dtype=stored.dtype, requires_grad=False)
        self.fill(result, key)
        return result

    def _values(self, piece: StoredPiece) -> Tensor:
        """Return the piece's values as a vector. The file is memory-mapped, so only used values are read from disk."""
        path = self.folder / piece.file
        try:
            if piece.file not in self._opened:
                self._opened[piece.file] = safe_open(str(path), "pt")
            return self._opened[piece.file].get_tensor(piece.name).view(-1)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise DamagedCheckpointError(f"{path} is missing or damaged ({error}).") from error


def _stored_pieces(path: Path) -> Iterator[tuple[str, Shape, torch.dtype, StoredPiece]]:
    """Yield (key, shape of the whole tensor, dtype, piece) of each piece in a file."""
    try:
        with safe_open(str(path), "pt") as file:
            places: Mapping[str, Any] = json.loads(file.metadata()[_METADATA])
            for name, (key, shape, offset, box_shape, (low, high)) in places.items():
                stored = file.get_slice(name)
                if math.prod(stored.get_shape()) != high - low:
                    raise ValueError(f"{key} has {stored.get_shape()} values instead of {high - low}")
                piece = StoredPiece(path.name, name, Box(tuple(offset), tuple(box_shape)), (low, high))
                yield key, tuple(shape), DTYPES[stored.get_dtype()], piece
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: its header cannot be read ({error!r}).") from error


def _boxes_of_span(box: Box, begin: int, end: int) -> Iterator[Box]:
    """Cut a range of a box's values, in row-major order, into consecutive boxes."""
    if begin >= end:
        return
    if not box.shape:
        yield box
        return
    inner = Box(box.offset[1:], box.shape[1:])
    row = inner.num_values
    first_whole, last_whole = -(-begin // row), end // row
    if first_whole > last_whole:  # inside one row
        yield from _in_row(box, last_whole, begin, end)
        return
    yield from _in_row(box, first_whole - 1, begin, first_whole * row)
    if first_whole < last_whole:
        yield Box((box.offset[0] + first_whole, *inner.offset), (last_whole - first_whole, *inner.shape))
    yield from _in_row(box, last_whole, last_whole * row, end)


def _in_row(box: Box, number: int, begin: int, end: int) -> Iterator[Box]:
    inner = Box(box.offset[1:], box.shape[1:])
    row = inner.num_values
    for part in _boxes_of_span(inner, begin - number * row, end - number * row):
        yield Box((box.offset[0] + number, *part.offset), (1, *part.shape))
