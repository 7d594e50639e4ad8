"""Ranks that hold parts of a model's tensors as Megatron lays them out, but no Megatron model, and that tell how many
bytes they take to bring these together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import held_parameters
from spurline_megatron_backend.weight_gathering import Held, WeightsOfRanks
from spurline_models.weights import NamedWeights
from spurline_ranks.group import Place
from spurline_ranks.pieces import Box
from spurline_ranks.publishing import Publishing
from spurline_ranks.weight_gathering import WeightGathering

Message = tuple[str, int, int]
"""The operation (isend, irecv), the other rank, and the bytes."""


def whole_tensors(model: Path, *, critic: bool) -> dict[str, Tensor]:
    """Return the tensors of a model by name. The head of a critic has other values."""
    causal = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    tensors = {name: value.detach() for name, value in causal.named_parameters()}
    if critic:
        tensors["lm_head.weight"] = torch.linspace(-1, 1, causal.config.hidden_size)[None]
    return tensors


def held_by(architecture: Architecture, grid: Grid, rank: int, tensors: Mapping[str, Tensor], *, critic: bool) -> Held:
    """Return the parts of these tensors that a rank holds. Copies and padding are NaN, since nothing may use them."""
    held = []
    for parameters in held_parameters(architecture, grid, grid.place(rank), critic=critic):
        for parameter in parameters.values():
            values = torch.full(parameter.shape, torch.nan)
            for part in () if parameter.is_copy else parameter.parts:
                box = tensors[part.name][part.box.slices_in(Box.whole(part.shape))]
                values.view(-1)[part.begin : part.end] = box.reshape(-1)
            held.append((parameter, values))
    return held


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that operations make while it is on. known: tensors that were there before."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._tensors: dict[int, int] = {}
        self._bytes = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                self._add(tensor)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        where, size = storage.data_ptr(), storage.nbytes()
        if where in self._known or not size:
            return
        if where not in self._tensors:
            self._bytes += size
            self.peak = max(self.peak, self._bytes)
        self._tensors[where] = self._tensors.get(where, 0) + 1
        weakref.finalize(tensor, self._remove, where, size)

    def _remove(self, where: int, size: int) -> None:
        self._tensors[where] -= 1
        if not self._tensors[where]:
            del self._tensors[where]
            self._bytes -= size


class GatheringWorker:
    """A rank that holds the parts of a model that `hold` chose last."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._messages: list[Message] = []
        self._exchange = dist.batch_isend_irecv
        dist.batch_isend_irecv = self._recorded

    def hold(self, model: str, plain_grid: Mapping[str, int], critic: bool, max_bytes: int) -> None:
        config, grid = AutoConfig.from_pretrained(model), Grid(**plain_grid)
        architecture = read_architecture(config)
        tensors = whole_tensors(Path(model), critic=critic)
        held = held_by(architecture, grid, self._place.rank, tensors, critic=critic)
        self._held = [values for _, values in held]
        self._messages = []
        self._gathers = WeightsOfRanks(architecture, grid, held, critic=critic, max_bytes=max_bytes)
        with torch.device("meta"):
            without_values = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._gathering = WeightGathering(NamedWeights(without_values, adapted=False), self._gathers)
        self.publishing = Publishing(self._place, {"model": self._gathering}, torch.float32)

    def gather(self, wanted: Mapping[int, Sequence[str]]) -> tuple[dict[str, Any], list[Message]]:
        """Return the tensors that came here, and the messages sent for them."""
        self._messages = []
        found = self._gathers.gather(wanted, None)
        return {name: value.numpy() for name, value in found.items()}, self._messages

    def peak_of_gathering(self, wanted: Mapping[int, Sequence[str]], dtype: str) -> int:
        """Return the peak of bytes that this rank allocates besides the parts it holds."""
        with Alive(self._held) as alive:
            self._gathers.gather(wanted, getattr(torch, dtype))
        return alive.peak

    def peak_of_writing(self, folder: str, dtype: str, max_file_bytes: int) -> int:
        """Return the peak while files of the weights are written."""
        with Alive(self._held) as alive:
            failure = self._gathering.write(Path(folder), getattr(torch, dtype), max_file_bytes, self._place.doing)
        assert failure is None, failure
        return alive.peak

    def messages(self) -> list[Message]:
        """Return the messages sent to make buckets since the last call."""
        found, self._messages = self._messages, []
        return found

    def peak_of_making(self, choice: Mapping[str, Any]) -> int:
        """Bytes of tensors that this rank has at most while all buckets are made and none is given back before the
        next; what a maker allocates counts too."""
        with Alive(self._held) as alive:
            for number in range(1, self.publishing.num_buckets(choice) + 1):
                self.publishing.make(choice, 1, number)
        self.publishing.taken()
        return alive.peak

    def _recorded(self, exchanges: Iterable[dist.P2POp]) -> Any:
        exchanges = [*exchanges]
        self._messages += [(each.op.__name__, each.peer, each.tensor.nbytes) for each in exchanges]
        return self._exchange(exchanges)
