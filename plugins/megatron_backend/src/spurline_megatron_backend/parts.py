"""Map each Megatron parameter of a rank to boxes (slices) of Hugging Face tensors.

Loading, gathering, checkpoints and plans use this map. No other module knows how Megatron arranges weights. Tensors
have the names and shapes of a transformers model in memory, where the experts of a layer are one tensor.

A flattened parameter consists of parts, and each part is a box that is flattened row by row. This covers all rules of
Megatron: parameters may be whole, or divided by rows or columns. One parameter may hold queries, keys and values by
group, or gate and up projection. The vocabulary is padded. This module imports neither torch.distributed nor megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid, Place
from spurline_ranks.pieces import Box, Shape


@dataclass(frozen=True)
class Part:
    """The values `begin` to `end` of a flattened parameter, which are the values in a box of a Hugging Face tensor.

    The tensor is `name`, with this `shape`.
    """

    name: str
    shape: Shape
    box: Box
    begin: int

    @property
    def end(self) -> int:
        return self.begin + self.box.num_values


@dataclass(frozen=True)
class HeldParameter:
    """A Megatron parameter of one rank.

    Attributes:
        shape: Its shape on this rank.
        parts: Its parts in order. After the parts come zeros for the padding of the vocabulary.
        is_divided: Whether the ranks of a tensor group hold different parts.
        is_expert: Whether it belongs to an expert. Experts are divided among other groups.
        is_copy: Whether it is a copy of the embedding: the output layer of a tied model on the last stage.
    """

    shape: Shape
    parts: tuple[Part, ...]
    is_divided: bool
    is_expert: bool = False
    is_copy: bool = False

    def counts_on(self, tensor_rank: int) -> bool:
        """Return whether this rank of a tensor group writes the values and adds them to sums.

        If several ranks have the same values, only the first of them counts. Copies of the embedding never count.
        """
        return not self.is_copy and (self.is_divided or tensor_rank == 0)


HeldParameters = Mapping[str, HeldParameter]
"""Parameters by Megatron's names, such as `decoder.layers.0.mlp.linear_fc1.weight`. Layers count from 0 in a part."""


def padded_vocabulary(architecture: Architecture, grid: Grid) -> int:
    """Return the number of rows of the embedding. It is padded to a multiple of the tensor group's size."""
    return math.ceil(architecture.vocabulary / grid.tensor) * grid.tensor


def held_parameters(
    architecture: Architecture, grid: Grid, place: Place, *, critic: bool = False
) -> tuple[HeldParameters, ...]:
    """Return the parameters of the rank at this place, for each part of the model on its stage.

    A critic has a value head instead of the output layer, and a model with `scores` a score head.
    """
    layers = grid.layers(architecture.num_layers, place.pipeline)
    last = len(layers) - 1
    return tuple(
        dict(
            _part_of_model(
                _Rules(architecture, grid, place),
                numbers,
                is_first=place.pipeline == 0 and index == 0,
                is_last=place.pipeline == grid.pipeline - 1 and index == last,
                critic=critic,
            )
        )
        for index, numbers in enumerate(layers)
    )


def whole_shapes(architecture: Architecture, *, critic: bool = False) -> dict[str, Shape]:
    """Return the shapes of all tensors of the model by name, in the order of the layers. Tied tensors appear once."""
    grid = Grid(1)
    (parameters,) = held_parameters(architecture, grid, grid.place(0), critic=critic)
    return {part.name: part.shape for parameter in parameters.values() for part in parameter.parts}


def _part_of_model(
    rules: _Rules, layers: range, *, is_first: bool, is_last: bool, critic: bool
) -> Iterator[tuple[str, HeldParameter]]:
    architecture = rules.architecture
    if is_first:
        yield "embedding.word_embeddings.weight", rules.vocabulary("model.embed_tokens.weight")
    for index, number in enumerate(layers):
        for name, parameter in rules.layer(f"model.layers.{number}."):
            yield f"decoder.layers.{index}.{name}", parameter
    if not is_last:
        return
    yield "decoder.final_layernorm.weight", rules.whole("model.norm.weight", architecture.hidden)
    if critic or architecture.scores:
        name = "score.weight" if architecture.scores else "lm_head.weight"
        yield "value_head.weight", rules.whole(name, 1, architecture.hidden)
    elif not architecture.tied:
        yield "output_layer.weight", rules.vocabulary("lm_head.weight")
    elif not is_first:
        yield "output_layer.weight", rules.vocabulary("model.embed_tokens.weight", is_copy=True)


@dataclass(frozen=True)
class _Rules:
    """The rules for dividing parameters, for the rank at this place."""

    architecture: Architecture
    grid: Grid
    place: Place

    def layer(self, at: str) -> Iterator[tuple[str, HeldParameter]]:
        """Yield (name in the layer, parameter) for one layer. In the Hugging Face model, `at` is the layer's prefix."""
        a = self.architecture
        yield "input_layernorm.weight", self.whole(f"{at}input_layernorm.weight", a.hidden)
        yield "self_attention.linear_qkv.weight", self._qkv(at, "weight", a.hidden)
        if a.qkv_bias:
            yield "self_attention.linear_qkv.bias", self._qkv(at, "bias")
        if a.qk_norm:
            yield "self_attention.q_layernorm.weight", self.whole(f"{at}self_attn.q_norm.weight", a.head_dim)
            yield "self_attention.k_layernorm.weight", self.whole(f"{at}self_attn.k_norm.weight", a.head_dim)
        proj = self._columns(f"{at}self_attn.o_proj.weight", a.hidden, a.heads * a.head_dim)
        yield "self_attention.linear_proj.weight", proj
        yield "pre_mlp_layernorm.weight", self.whole(f"{at}post_attention_layernorm.weight", a.hidden)
        if a.num_experts:
            yield "mlp.router.weight", self.whole(f"{at}mlp.gate.weight", a.num_experts, a.hidden)
            yield from self._experts(f"{at}mlp.experts.")
        else:
            gate_and_up = [f"{at}mlp.{kind}_proj.weight" for kind in ("gate", "up")]
            yield "mlp.linear_fc1.weight", self._gated(gate_and_up)
            yield "mlp.linear_fc2.weight", self._columns(f"{at}mlp.down_proj.weight", a.hidden, a.ffn)

    def whole(self, name: str, *shape: int) -> HeldParameter:
        """Give the whole tensor to all ranks of a tensor group."""
        return HeldParameter(shape, (Part(name, shape, Box.whole(shape), 0),), is_divided=False)

    def vocabulary(self, name: str, *, is_copy: bool = False) -> HeldParameter:
        """Divide a tensor by rows. Because of padding, the last ranks may hold fewer of its rows."""
        a, rank = self.architecture, self.place.tensor
        rows = padded_vocabulary(a, self.grid) // self.grid.tensor
        real = max(0, min(rows, a.vocabulary - rank * rows))
        box = Box((rank * rows, 0), (real, a.hidden))
        parts = (Part(name, (a.vocabulary, a.hidden), box, 0),) if real else ()
        return HeldParameter((rows, a.hidden), parts, is_divided=True, is_copy=is_copy)

    def _columns(self, name: str, rows: int, columns: int) -> HeldParameter:
        """Divide a tensor evenly by columns."""
        mine = columns // self.grid.tensor
        box = Box((0, self.place.tensor * mine), (rows, mine))
        return HeldParameter((rows, mine), (Part(name, (rows, columns), box, 0),), is_divided=True)

    def _qkv(self, at: str, kind: str, *width: int) -> HeldParameter:
        """Divide the groups of heads evenly. Each group has its queries, then its key, then its value."""
        a = self.architecture
        groups = a.key_value_heads // self.grid.tensor
        queries = a.heads // a.key_value_heads * a.head_dim
        parts: list[Part] = []
        end = 0
        for group in range(self.place.tensor * groups, (self.place.tensor + 1) * groups):
            for letter, rows in (("q", queries), ("k", a.head_dim), ("v", a.head_dim)):
                box = Box((group * rows, *(0 for _ in width)), (rows, *width))
                shape = (a.key_value_heads * rows, *width)
                parts.append(Part(f"{at}self_attn.{letter}_proj.{kind}", shape, box, end))
                end = parts[-1].end
        return HeldParameter((groups * (queries + 2 * a.head_dim), *width), tuple(parts), is_divided=True)

    def _gated(self, names: list[str]) -> HeldParameter:
        """Put the rank's rows of the gate before its rows of the up projection."""
        a = self.architecture
        rows = a.ffn // self.grid.tensor
        box = Box((self.place.tensor * rows, 0), (rows, a.hidden))
        parts = tuple(Part(name, (a.ffn, a.hidden), box, index * box.num_values) for index, name in enumerate(names))
        return HeldParameter((2 * rows, a.hidden), parts, is_divided=True)

    def _experts(self, at: str) -> Iterator[tuple[str, HeldParameter]]:
        """Yield this rank's experts. In `gate_up_proj`, the rows of the up projection follow the rows of the gate."""
        a, place = self.architecture, self.place
        count = a.num_experts // self.grid.expert
        rows = a.expert_ffn // self.grid.expert_tensor
        first = place.expert_tensor * rows
        for index in range(count):
            expert = place.expert * count + index
            halves = (Box((expert, half * a.expert_ffn + first, 0), (1, rows, a.hidden)) for half in (0, 1))
            gate_and_up = tuple(
                Part(f"{at}gate_up_proj", (a.num_experts, 2 * a.expert_ffn, a.hidden), box, half * box.num_values)
                for half, box in enumerate(halves)
            )
            down = Part(
                f"{at}down_proj",
                (a.num_experts, a.hidden, a.expert_ffn),
                Box((expert, 0, first), (1, a.hidden, rows)),
                0,
            )
            local = f"mlp.experts.local_experts.{index}"
            yield f"{local}.linear_fc1.weight", HeldParameter((2 * rows, a.hidden), gate_and_up, True, is_expert=True)
            yield f"{local}.linear_fc2.weight", HeldParameter((a.hidden, rows), (down,), True, is_expert=True)
