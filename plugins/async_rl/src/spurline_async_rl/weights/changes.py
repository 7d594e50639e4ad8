"""Send only what changed in the weights since the last publish, over any transport that moves bytes.

After a step of reinforcement learning, most values of 16-bit weights have not changed, and the others differ in their
last bits. A `ChangesMaker` compares each block of a tensor with the version that it sent before:

- nothing is sent for a block without a change;
- otherwise the exclusive or of both versions is sent, its bytes grouped by significance and compressed with Zstandard;
- a block that would not get smaller, or that was never sent before, is sent as it is.

A `ChangesReader` in the engine's worker undoes this. The result is exact, and a digest of each tensor proves it. Both
sides keep a copy of the weights in the host's memory.

Data flow: weights -> blocks -> one tensor of bytes -> the transport -> blocks -> weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from spurline.errors import BucketLostError
from spurline.plugins.registry import resolve
from spurline_models.weight_buckets import BucketMaker, WeightBucket

CHANGES_MAKER = f"{__name__}:ChangesMaker"
_CHANGES = "changes"
"""Key of a bucket's `where`, with the version and a plain `_Sent` of each tensor. It also names the tensor of bytes."""
_BLOCK_BYTES = 4 << 20
"""Bytes of a block. Blocks are compared and compressed on several threads."""
_NUM_THREADS = min(8, os.cpu_count() or 1)

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class _Sent:
    """A tensor in a bucket.

    Attributes:
        base: The version that its changes are relative to; None if all blocks are sent as they are.
        sizes: Bytes sent for each block: 0 for a block without a change, all of its bytes for one sent as it is.
        digest: Digest of the new values.
    """

    name: str
    dtype: str
    shape: Sequence[int]
    base: int | None
    sizes: Sequence[int]
    digest: str


@dataclass(frozen=True)
class _Held:
    """A tensor of a version of the weights, contiguous and in the host's memory."""

    version: int
    tensor: Tensor


class ChangesMaker:
    """A `BucketMaker` that makes buckets of changes since the previous version, with another maker.

    Args:
        maker: The other maker, as "module:Class".
        settings: Arguments of the other maker.
        chain: Number of the chain of publishes. Each chain has a new maker, which sends whole weights first.
        among: Further arguments of the other maker.
    """

    def __init__(self, maker: str, settings: Mapping[str, Any], chain: int, **among: int) -> None:
        self._maker: BucketMaker = resolve(maker, "maker of weight buckets")(**settings, **among)
        self._held: dict[str, _Held] = {}

    def make(self, version: int, number: int, weights: Iterable[tuple[str, Tensor]]) -> WeightBucket:
        sent: list[_Sent] = []
        parts: list[Bytes] = []
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for name, tensor in weights:
                copy = tensor.detach().to("cpu", copy=True).contiguous()
                new, old = _bytes_of(copy), self._held.get(name)
                blocks = _blocks(len(new))
                if old is None:
                    made = [new[block] for block in blocks]
                else:
                    width, before = tensor.element_size(), _bytes_of(old.tensor)
                    made = list(threads.map(lambda block: _change(before[block], new[block], width), blocks))  # noqa: B023 - used before the next turn
                sizes = [len(block) for block in made]
                dtype = str(tensor.dtype).removeprefix("torch.")
                base = None if old is None else old.version
                sent.append(_Sent(name, dtype, tuple(tensor.shape), base, sizes, _digest(new)))
                parts += made
                self._held[name] = _Held(version, copy)
        together = torch.from_numpy(np.concatenate([*parts, np.zeros(0, np.uint8)]))
        bucket = self._maker.make(version, number, [(_CHANGES, together)])
        plain = [list(vars(each).values()) for each in sent]
        return replace(bucket, where={**bucket.where, _CHANGES: {"version": version, "tensors": plain}})

    def taken(self) -> None:
        self._maker.taken()

    def close(self) -> None:
        self._held.clear()
        self._maker.close()


class ChangesReader:
    """Turns the changes in a bucket into weights, in one worker of an engine."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def read(self, bucket: WeightBucket, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return the weights of a bucket.

        Args:
            bucket: The bucket, as it was made.
            weights: Its tensors, as the transport's reader returns them.

        Returns:
            `weights`, if no `ChangesMaker` made the bucket. Otherwise the weights, as views of memory that the next
            update overwrites, or nothing if the transport's reader returned nothing.

        Raises:
            BucketLostError: If this worker lacks the version that the changes are relative to, or a digest differs.
        """
        changes = bucket.where.get(_CHANGES)
        if changes is None:
            return weights
        arrived = dict(weights)
        if _CHANGES not in arrived:
            return []
        data = _bytes_of(arrived[_CHANGES].cpu())
        tensors = [_Sent(*values) for values in changes["tensors"]]
        ends = [0, *accumulate(sum(each.sizes) for each in tensors)]
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            return [
                (each.name, self._tensor(each, data[start:end], changes["version"], bucket.receiver, threads))
                for each, (start, end) in zip(tensors, pairwise(ends), strict=True)
            ]

    def _tensor(self, sent: _Sent, data: Bytes, version: int, receiver: str, threads: ThreadPoolExecutor) -> Tensor:
        dtype = cast("torch.dtype", getattr(torch, sent.dtype))
        held = self._held.pop(sent.name, None)
        if sent.base is not None and (held is None or held.version != sent.base):
            has = "no version" if held is None else f"version {held.version}"
            raise BucketLostError(
                f"{receiver or 'an engine'} has {has} of {sent.name}, but was sent the changes since {sent.base}"
            )
        tensor = torch.empty(tuple(sent.shape), dtype=dtype)
        if held is not None and (held.tensor.dtype, held.tensor.shape) == (dtype, tensor.shape):
            tensor = held.tensor
        values = _bytes_of(tensor)
        parts = [data[start:end] for start, end in pairwise([0, *accumulate(sent.sizes)])]
        blocks = (values[block] for block in _blocks(len(values)))
        # The list waits for all blocks, and raises their errors.
        list(threads.map(lambda block, part: _apply(block, part, dtype.itemsize), blocks, parts))
        if _digest(values) != sent.digest:
            raise BucketLostError(f"{sent.name} differs from what was sent to {receiver or 'an engine'}")
        self._held[sent.name] = _Held(version, tensor)
        return tensor


def _bytes_of(tensor: Tensor) -> Bytes:
    """Return the memory of a contiguous tensor on the CPU, uint8 [bytes]."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _blocks(size: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK_BYTES, size)) for start in range(0, size, _BLOCK_BYTES)]


def _change(old: Bytes, new: Bytes, width: int) -> Bytes:
    """Return the bytes to send for a block of values of `width` bytes. See the head of this module."""
    changed = old ^ new
    if not changed.any():
        return changed[:0]
    # Exponents and signs seldom change, so their bytes are nearly all zero, and are compressed best together.
    grouped = np.ascontiguousarray(changed.reshape(-1, width).T).reshape(-1)
    compressed = pa.Codec("zstd", 1).compress(grouped, asbytes=True)
    return np.frombuffer(compressed, np.uint8) if len(compressed) < len(new) else new


def _apply(values: Bytes, part: Bytes, width: int) -> None:
    """Change the block's old values into the new ones, in place."""
    if not len(part):
        return
    if len(part) == len(values):
        values[:] = part
        return
    grouped = np.frombuffer(pa.Codec("zstd").decompress(part, len(values), asbytes=True), np.uint8)
    by_significance = values.reshape(-1, width).T
    by_significance ^= grouped.reshape(width, -1)


def _digest(values: Bytes) -> str:
    return xxhash.xxh3_64_hexdigest(values.data)
