"""Hash the rows, the rollouts and the weights of a step.

The hashes do not depend on how rows are packed or padded, nor on the order of rows, groups or tensors. They find
accidents, such as a flipped bit or another file. They do not protect against somebody who wants to deceive.

Weights are hashed at the speed of memory, on the device where they are. A tensor is read as 32-bit words w_i, and its
hash is the sum of w_i * r_i modulo 2^64 with fixed odd numbers r_i: the multilinear hash of Lemire and Kaser, "Strongly
universal string hashing is fast", 2014. One changed word always changes the sum, since an odd number has an inverse
modulo 2^64. The sums of all tensors, multiplied by odd numbers made from their names, add up to the hash of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from spurline.data.batch import OPTIONAL_TOKEN_COLUMNS, TOKEN_COLUMNS, TrainingBatch
from spurline.digests import digest_file
from spurline.protocols.backend import Backend, LendsParameters
from spurline_models.abilities import TrainsAdapters

_WORDS = 1 << 16
"""Words of a block. The multipliers of one block serve all blocks."""
_BLOCKS = 8
"""Blocks that are hashed together: 4 MiB of products, which fit into the caches of processors."""
_MADE_LATER = {*TOKEN_COLUMNS, *OPTIONAL_TOKEN_COLUMNS} - {"input_ids", "loss_weights", "labels"}
"""Columns that say where tokens are in a batch, or that models compute."""


def rows_hash(batch: TrainingBatch) -> str:
    """Return the hash of the samples of a batch: tokens, loss weights, labels and carried columns, by sample."""
    columns = {name: batch.tokens[name].numpy() for name in sorted(batch.tokens.keys() - _MADE_LATER)}
    columns["input_ids"] = columns["input_ids"].astype(np.int64)
    if "pair_ids" in batch.tokens:
        # The number of a pair depends on its place in the batch. Its sign tells the better answer from the worse one.
        columns["pair_ids"] = np.sign(batch.tokens["pair_ids"].numpy())
    segment_ids = batch.tokens["segment_ids"].numpy()
    names = [batch.segments[name] for name in ("uid", "sample", "turn")]
    return _joined(
        _hash_of(*(column[row][number] for column in names), *(values[row][places] for values in columns.values()))
        for row in range(batch.num_rows)
        for number in range(len(names[0][row]))
        for places in [np.flatnonzero(segment_ids[row] == number + 1)]
    )


def prompts_hash(groups: Sequence[Any]) -> str:
    """Return the hash of the prompts that were drawn for these groups of rollouts."""
    return _joined(_hash_of(group.uid, group.draw, group.trajectories[0].turns[0].prompt_ids) for group in groups)


def rollouts_hash(groups: Sequence[Any]) -> str:
    """Return the hash of the tokens, logprobs and rewards of all attempts of these groups of rollouts."""
    return _joined(_hash_of(group.uid, group.draw, *_arrays(group.flat)) for group in groups)


def _arrays(flat: Any) -> Iterator[Any]:
    yield from (flat.samples, flat.numbers, flat.num_prompt, flat.num_response, flat.tokens())
    for name in ("logprobs", "loss_mask", "rewards"):
        if name in flat.columns:
            yield from (name, flat.columns[name])


def _hash_of(*parts: Any) -> str:
    """Return a hash of texts, numbers and arrays, each with its size, so that no two lists of parts look alike."""
    digest = xxhash.xxh3_128()
    for part in parts:
        content = np.ascontiguousarray(part).tobytes() if isinstance(part, np.ndarray) else str(part).encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _joined(hashes: Iterable[str]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(sorted(hashes)).encode())


def content_hash(path: Path) -> str:
    """Return the hash of the content of a file, or of all files in a folder and their names."""
    files = sorted(each for each in (path, *path.rglob("*")) if each.is_file())
    return _hash_of(*(part for file in files for part in (file.relative_to(path), digest_file(file).xxh3)))


def chain_hash(before: str, line: Mapping[str, Any]) -> str:
    """Return the hash of a step's line and of all lines before it, whose hash is `before`."""
    return _hash_of(before, *(line.get(name) or "" for name in ("step", *_CHAINED)))


_CHAINED = ("weights_before", "rows", "rollouts", "weights_after")
"""Hashes of a step that each backend can make, in the order in which a step needs and makes what they are of."""
PARTS = (*_CHAINED, "critic_after")
"""All hashes of a step. Only some backends lend a critic's weights, so the chain goes without them."""


def policy_hash(backend: Backend) -> str:
    """Return the hash of the policy's weights: of its adapters if they are trained, else of the published weights.

    If the backend lends fp32 master weights, they are hashed in place of published weights of the same name.
    """
    if isinstance(backend, TrainsAdapters) and backend.adapter_settings() is not None:
        return weights_hash(backend.named_adapter_weights())
    masters = backend.trained_parameters() if isinstance(backend, LendsParameters) else {}
    return weights_hash((name, masters.get(name, tensor)) for name, tensor in backend.named_weights())


def critic_hash(backend: Backend) -> str | None:
    """Return the hash of the trained weights of the critic, or None if the backend does not lend them."""
    return weights_hash(backend.trained_parameters("critic").items()) if isinstance(backend, LendsParameters) else None


def weights_hash(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the hash of named tensors, which does not depend on their order."""
    return f"{sum(tensor_hash(name, tensor) for name, tensor in named) % 2**64:016x}"


def tensor_hash(name: str, tensor: Tensor) -> int:
    """Return the hash of one named tensor, in 0..2^64-1. The tensor may be on any device."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(data) % 4:
        data = torch.nn.functional.pad(data, (0, -len(data) % 4))
    multipliers, products = _tables(str(data.device))
    sums: list[Tensor] = []
    for words in data.view(torch.int32).split(products.numel()):
        blocks = len(words) // _WORDS
        whole, rest = words[: blocks * _WORDS].view(blocks, _WORDS), words[blocks * _WORDS :]
        sums.append(products[:blocks].copy_(whole).mul_(multipliers).sum(1))
        sums.append((rest * multipliers[: len(rest)]).sum().view(1))
    # Fetch all sums at once, since a device is fast only if it need not wait for the host.
    total = sum(value * _odd(f"block {number}") for number, value in enumerate(torch.cat(sums).tolist()))
    seed = _odd(f"{name} {tensor.dtype} {list(tensor.shape)}")
    return (total * seed + seed) % 2**64


@cache
def _tables(device: str) -> tuple[Tensor, Tensor]:
    """Return the odd multipliers of a block, int64 [_WORDS], and memory for products, int64 [_BLOCKS, _WORDS].

    Products and sums of int64 wrap around at 2^64. Memory that is used again is in the cache of the processor.
    """
    drawn = np.random.default_rng(np.random.PCG64(0x5EED)).integers(0, 2**64, _WORDS, np.uint64) | np.uint64(1)
    multipliers = torch.from_numpy(drawn.view(np.int64)).to(device)
    return multipliers, multipliers.new_empty(_BLOCKS, _WORDS)


@cache
def _odd(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode()) | 1
