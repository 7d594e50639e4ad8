"""Pieces: what many processes wrote, any others read, and nothing that is not whole."""

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

from spurline.digests import digest_file, verify_files
from spurline.errors import DamagedCheckpointError
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


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """`a` and `b` on two ranks."""
    for rank, (begin, end) in enumerate([(0, 4), (4, 7)]):
        write_pieces(tmp_path, rank, [rows("a", numbered(), begin, end), rows("b", numbered(), begin, end)])
    return tmp_path


def test_a_file_that_is_missing_or_one_too_many_is_a_damaged_checkpoint(written: Path) -> None:
    write_pieces(written, 2, [rows("b", numbered(), 4, 7)])
    with pytest.raises(DamagedCheckpointError, match=r"rank-00002.* hold 120 values of b, which has 84"):
        PieceIndex.of(written)
    for rank in (1, 2):
        (written / f"rank-0000{rank}.part-000.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000.* hold 48 values of a, which has 84"):
        PieceIndex.of(written)


def test_every_truncation_of_a_file_is_named(written: Path) -> None:
    path = written / "rank-00001.part-000.safetensors"
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedCheckpointError, match=r"rank-00001\.part-000\.safetensors is damaged"):
            PieceIndex.of(written)


def test_a_changed_header_is_named_and_changed_values_by_their_digest(tmp_path: Path) -> None:
    digests = write_pieces(tmp_path, 0, [whole("w", numbered())])
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"F32"', b'"F31"'))
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000.*header cannot be read.*F31"):
        PieceIndex.of(tmp_path)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    PieceIndex.of(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000.*its content has changed"):
        verify_files(tmp_path, digests)


def test_writing_and_reading_take_the_memory_of_one_tensor(tmp_path: Path) -> None:
    large = torch.zeros(32 << 20, dtype=torch.uint8)
    pieces = [whole(f"w{number}", large) for number in range(6)]
    before = anonymous_bytes()
    digests = write_pieces(tmp_path, 0, pieces)
    assert digests["rank-00000.part-000.safetensors"].num_bytes > 6 * large.nbytes
    index = PieceIndex.of(tmp_path)
    kept = [index.read("w3", Box((begin << 20,), (1 << 20,))) for begin in range(8)]
    assert anonymous_bytes() - before < 2 * large.nbytes, len(kept)
