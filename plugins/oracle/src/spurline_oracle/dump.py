"""Read a dump of `GradientRecorder` as rows of tokens, and say which tokens are to be learned.

The intention is read strictly: a token is learned if its label or mask says so, it is no padding, and it is not the
first one of its sequence. Its prediction comes from the token before it in the same sequence.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spurline.errors import DataError
from spurline_oracle.recorder import FORMAT

IGNORED = -100
"""The label of a position without loss."""

NUMBERS = ("advantages", "old_logprobs", "reference_logprobs")
"""Columns of numbers that losses read for each token."""


@dataclass(frozen=True)
class Row:
    """A row of a micro-batch. All tensors are [length], aligned to token positions.

    rank, micro_batch: where it was computed. tokens: int64. asked: fp64, 1 or a weight where labels or the mask ask for
    a loss on the token. labels: int64, the tokens that labels name. sample: int64, the number of the sequence within
    the row, -1 on padding. positions: int64, as recorded, or None. numbers: fp64, columns that the loss reads.
    pair: the number of its preference pair, or None. chosen: whether it is the chosen one of the pair.
    """

    rank: int
    micro_batch: int
    tokens: Tensor
    asked: Tensor
    labels: Tensor
    sample: Tensor
    positions: Tensor | None
    numbers: dict[str, Tensor]
    pair: int | None
    chosen: bool

    @property
    def valid(self) -> Tensor:
        """Say for each token whether it is no padding: bool [length]."""
        return self.sample >= 0

    @cached_property
    def starts(self) -> Tensor:
        """Say for each token whether it is the first one of its sequence: bool [length]."""
        return self.valid & (self.within == 0)

    @cached_property
    def wanted(self) -> Tensor:
        """The weights of tokens that are to be learned, before they are normalized: fp64 [length]."""
        return self.asked * (self.valid & ~self.starts)

    @cached_property
    def ranges(self) -> list[range]:
        """The positions of each sequence."""
        samples, counts = self.sample.unique_consecutive(return_counts=True)
        found = zip(samples.tolist(), counts.cumsum(0).tolist(), counts.tolist(), strict=True)
        return [range(end - count, end) for sample, end, count in found if sample >= 0]

    @cached_property
    def within(self) -> Tensor:
        """The position of each token within its sequence: int64 [length], 0 on padding."""
        positions = torch.zeros_like(self.tokens)
        for each in self.ranges:
            positions[each.start : each.stop] = torch.arange(len(each))
        return positions


@dataclass(frozen=True)
class Dump:
    """A dump: `facts` of its JSON, `rows` of all ranks, `gradients` by name, outputs of `layers` of the first rows."""

    folder: Path
    facts: dict[str, Any]
    rows: list[Row]
    gradients: dict[str, Tensor]
    layers: list[Tensor]

    @property
    def loss(self) -> dict[str, Any]:
        """The settings of the loss."""
        return self.facts["loss"]

    @property
    def model_path(self) -> str:
        """The folder or hub name of the model."""
        return self.facts["model_path"] or str(self.folder / "model")

    @property
    def micro_batches(self) -> list[list[int]]:
        """Indices of rows by micro-batch, over all ranks."""
        return self._groups(lambda row: (row.rank, row.micro_batch))

    @property
    def ranks(self) -> list[list[int]]:
        """Indices of rows by rank."""
        return self._groups(lambda row: row.rank)

    def _groups(self, key: Any) -> list[list[int]]:
        return [list(found) for _, found in groupby(range(len(self.rows)), lambda index: key(self.rows[index]))]


def read_dump(folder: Path) -> Dump:
    """Read a dump.

    Raises:
        DataError: If a file is missing or damaged, or the batch cannot be understood.
    """
    try:
        facts = json.loads((folder / "dump.json").read_text())
        gradients = load_file(folder / "gradients.safetensors")
        files = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(facts["num_ranks"])]
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise DataError(
            f"{folder} is not a complete dump of GradientRecorder: {error}. Each data-parallel rank writes "
            "rank-N.safetensors, and the first process dump.json and gradients.safetensors, when it calls save()."
        ) from error
    if facts.get("format") != FORMAT:
        raise DataError(f"{folder}/dump.json has format {facts.get('format')}, and this version reads {FORMAT}.")
    if not gradients:
        raise DataError(f"{folder} has no gradients. Call save() after backward, before zero_grad().")
    rows: list[Row] = []
    for rank, file in enumerate(files):
        numbers = {int(name.partition(".")[0]) for name in file if not name.startswith("layer.")}
        for micro_batch in sorted(numbers):
            start = f"{micro_batch}."
            columns = {name.removeprefix(start): value for name, value in file.items() if name.startswith(start)}
            where = f"{folder}, rank {rank}, micro-batch {micro_batch}"
            rows += _rows(columns, rank, micro_batch, facts["loss"], where)
    if not any(bool(row.wanted.any()) for row in rows):
        raise DataError(f"{folder} has no token with loss. Record labels or loss_mask.")
    layers = [files[0][f"layer.{index}"] for index in range(len(files[0])) if f"layer.{index}" in files[0]]
    return Dump(folder, facts, rows, gradients, layers)


def _rows(columns: dict[str, Tensor], rank: int, micro_batch: int, loss: dict[str, Any], where: str) -> list[Row]:
    if "input_ids" not in columns or not {"labels", "loss_mask"} & columns.keys():
        raise DataError(f"{where} has columns {', '.join(columns)}. It needs input_ids, and labels or loss_mask.")
    tokens = columns["input_ids"].reshape(-1, columns["input_ids"].shape[-1]).long()
    num_rows, length = tokens.shape
    rows: list[Row] = []
    for index in range(num_rows):
        own: dict[str, Tensor] = {}
        for name, value in columns.items():
            # One row may stand for all of them, such as that of position_ids.
            each = value.expand(num_rows, -1) if value.dim() == 2 and len(value) == 1 else value
            own[name] = each.reshape(num_rows, -1)[index] if each.numel() % num_rows == 0 else each.flatten()
            per_token = name not in ("pair", "chosen", *NUMBERS) or len(own[name]) != 1
            if per_token and len(own[name]) != length:
                raise DataError(f"{where}: {name} has shape {list(value.shape)}, and input_ids {list(tokens.shape)}.")
        rows.append(_row(own, tokens[index], rank, micro_batch, loss, f"{where}, row {index}"))
    return rows


def _row(own: dict[str, Tensor], tokens: Tensor, rank: int, micro_batch: int, loss: dict[str, Any], where: str) -> Row:
    labels = own.get("labels", tokens).long()
    asked = own["loss_mask"].double() if "loss_mask" in own else torch.ones(len(tokens), dtype=torch.float64)
    asked = asked * (labels != IGNORED)
    if loss.get("labels") == "next":
        labels = torch.cat([torch.tensor([IGNORED]), labels[:-1]])
        asked = torch.cat([torch.zeros(1, dtype=torch.float64), asked[:-1]])
    if "loss_mask" in own and "labels" not in own:
        labels = torch.where(asked > 0, tokens, IGNORED)
    valid = own["attention_mask"].bool() if "attention_mask" in own else torch.ones(len(tokens), dtype=torch.bool)
    positions = own["position_ids"].long() if "position_ids" in own else None
    valid = valid & (own["segment_ids"] > 0 if "segment_ids" in own else True)
    places = valid.nonzero().flatten()
    of_places = own["segment_ids"][places].long() if "segment_ids" in own else torch.zeros_like(places)
    if "segment_ids" not in own and positions is not None:
        # Positions restart with each sequence. Those of padding may be anything.
        of_places[1:] = (positions[places].diff() != 1).cumsum(0)
    if bool(((places.diff() > 1) & (of_places.diff() == 0)).any()):
        raise DataError(f"{where}: the attention_mask has zeros between tokens of a sequence. Move them to the ends.")
    numbers = {name: own[name].double().expand(len(tokens)) for name in NUMBERS if name in own}
    return Row(
        rank,
        micro_batch,
        tokens,
        asked,
        labels,
        torch.full_like(tokens, -1).index_put_((places,), of_places),
        positions,
        numbers,
        int(own["pair"]) if "pair" in own else None,
        bool(own.get("chosen", False)),
    )
