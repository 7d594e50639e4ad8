"""Pieces: what many processes wrote, any others read."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_helpers import anonymous_bytes
from safetensors.torch import load_file
from torch import Tensor

from spurline.digests import digest_file
from spurline_ranks.pieces import Box, Piece, PieceIndex, write_pieces

SHAPE = (7, 4, 3)


def numbered(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape).to(dtype)


def rows(key: str, tensor: Tensor, begin: int, end: int) -> Piece:
    box = Box((begin, *(0 for _ in tensor.shape[1:])), (end - begin, *tensor.shape[1:]))
    return Piece(key, tuple(tensor.shape), box, tensor[begin:end])


def span(key: str, tensor: Tensor, begin: int, end: int) -> Piece:
    values = tensor.reshape(-1)[begin:end]
    return Piece(key, tuple(tensor.shape), Box.whole(tensor.shape), values, (begin, end))


def whole(key: str, tensor: Tensor) -> Piece:
    return Piece(key, tuple(tensor.shape), Box.whole(tensor.shape), tensor)


def read_whole(folder: Path, key: str) -> Tensor:
    index = PieceIndex.of(folder)
    return index.read(key, Box.whole(index.tensors[key].shape))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_box_is_read_out_of_the_pieces_of_any_number_of_ranks(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    shape = data.draw(st.sampled_from([(7,), (5, 6), SHAPE, (1, 9)]))
    tensor = numbered(shape)
    in_ranges = data.draw(st.booleans())
    length = tensor.numel() if in_ranges else shape[0]
    cuts = sorted({0, length, *data.draw(st.lists(st.integers(0, length), max_size=4))})
    for rank, (begin, end) in enumerate(pairwise(cuts)):
        piece = (span if in_ranges else rows)("w", tensor, begin, end)
        write_pieces(folder, rank, [piece], part_bytes=data.draw(st.sampled_from([4, 20, 1 << 20])))
    ends = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
    box = Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))
    got = PieceIndex.of(folder).read("w", box)
    assert torch.equal(got, tensor[tuple(slice(low, high) for low, high in ends)])


def test_ranges_of_boxes_that_divide_the_columns_are_read_as_one_tensor(tmp_path: Path) -> None:
    # As a distributed optimizer holds them: columns by tensor parallelism, ranges of these by data parallelism.
    tensor = numbered((6, 8))
    for part in range(2):
        half = tensor[:, 4 * part : 4 * part + 4]
        for rank, (begin, end) in enumerate([(0, 5), (5, 17), (17, 24)]):
            values = half.reshape(-1)[begin:end]
            piece = Piece("w", (6, 8), Box((0, 4 * part), (6, 4)), values, (begin, end))
            write_pieces(tmp_path, 3 * part + rank, [piece])
    assert torch.equal(read_whole(tmp_path, "w"), tensor)
    assert torch.equal(PieceIndex.of(tmp_path).read("w", Box((1, 3), (4, 3))), tensor[1:5, 3:6])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"narrow": torch.ones(3, dtype=torch.uint8), "it": numbered((3, 5), dtype), "one": numbered((), dtype)}
    write_pieces(tmp_path, 0, [whole(key, tensor) for key, tensor in tensors.items()])
    for key, tensor in tensors.items():
        assert torch.equal(read_whole(tmp_path, key), tensor)


def test_files_are_plain_safetensors_of_at_most_the_size_asked_for(tmp_path: Path) -> None:
    tensors = {f"layer.{number}": torch.randn(40, 8) for number in range(9)}
    digests = write_pieces(tmp_path, 3, [whole(key, tensor) for key, tensor in tensors.items()], part_bytes=3000)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [f"rank-00003.part-{part:03d}.safetensors" for part in range(5)]
    assert digests == {file.name: digest_file(file) for file in files}
    for file in files:
        values = load_file(file)
        assert sum(tensor.nbytes for tensor in values.values()) <= 3000
        for key, tensor in values.items():
            assert torch.equal(tensor, tensors[key])


def test_writing_and_reading_take_the_memory_of_one_tensor(tmp_path: Path) -> None:
    large = torch.zeros(32 << 20, dtype=torch.uint8)
    pieces = [whole(f"w{number}", large) for number in range(6)]
    before = anonymous_bytes()
    digests = write_pieces(tmp_path, 0, pieces)
    assert digests["rank-00000.part-000.safetensors"].num_bytes > 6 * large.nbytes
    index = PieceIndex.of(tmp_path)
    kept = [index.read("w3", Box((begin << 20,), (1 << 20,))) for begin in range(8)]
    assert anonymous_bytes() - before < 2 * large.nbytes, len(kept)
