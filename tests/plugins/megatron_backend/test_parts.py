"""The table of parts against code that cuts whole tensors as Megatron-core does, for any architecture and grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.parallel_state import RankGenerator
from megatron_models import FAMILIES, divided, tiny_causal, tiny_config
from torch import Tensor

from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.grid import Grid, part_sizes
from spurline_megatron_backend.parts import held_parameters, padded_vocabulary, whole_shapes


def numbered(architecture: Architecture, *, critic: bool = False) -> dict[str, Tensor]:
    """The tensors of a whole model, every value of which is another number."""
    tensors: dict[str, Tensor] = {}
    begin = 1
    for name, shape in whole_shapes(architecture, critic=critic).items():
        count = torch.Size(shape).numel()
        tensors[name] = torch.arange(begin, begin + count).view(shape)
        begin += count
    return tensors


def made_of_parts(
    architecture: Architecture, grid: Grid, rank: int, tensors: Mapping[str, Tensor], *, critic: bool = False
) -> list[dict[str, Tensor]]:
    """The parameters of a rank by the table under test."""
    found: list[dict[str, Tensor]] = []
    for parameters in held_parameters(architecture, grid, grid.place(rank), critic=critic):
        found.append({})
        for name, parameter in parameters.items():
            values = torch.zeros(parameter.shape, dtype=torch.int64).view(-1)
            for part in parameter.parts:
                assert part.shape == tensors[part.name].shape
                box = tuple(map(slice, part.box.offset, part.box.end))
                values[part.begin : part.end] = tensors[part.name][box].reshape(-1)
            found[-1][name] = values.view(parameter.shape)
    return found


def made_by_cutting(
    architecture: Architecture, grid: Grid, rank: int, tensors: Mapping[str, Tensor], *, critic: bool = False
) -> list[dict[str, Tensor]]:
    """The same by reshaping and cutting whole tensors, as scripts that convert checkpoints for Megatron do."""
    a = architecture
    order = RankGenerator(grid.tensor, 1, grid.data, grid.pipeline, grid.context, "tp-cp-ep-dp-pp")
    tensor, stage = (
        next(ranks for ranks in order.get_ranks(kind) if rank in ranks).index(rank) for kind in ("tp", "pp")
    )
    generator = RankGenerator(grid.expert_tensor, grid.expert, grid.expert_data, grid.pipeline, 1, "tp-cp-ep-dp-pp")
    expert, expert_tensor = (
        next(ranks for ranks in generator.get_ranks(kind) if rank in ranks).index(rank) for kind in ("ep", "tp")
    )

    def rows(weight: Tensor) -> Tensor:
        return weight.chunk(grid.tensor, 0)[tensor]

    def vocabulary(weight: Tensor) -> Tensor:
        padding = weight.new_zeros(-len(weight) % grid.tensor, weight.shape[1])
        return rows(torch.cat([weight, padding]))

    def layer(at: str) -> dict[str, Tensor]:
        own: dict[str, Tensor] = {}
        for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
            q, k, v = (tensors[f"{at}self_attn.{letter}_proj.{kind}"] for letter in "qkv")
            by_group = [part.reshape(a.key_value_heads, -1, a.head_dim, *part.shape[1:]) for part in (q, k, v)]
            own[f"self_attention.linear_qkv.{kind}"] = rows(torch.cat(by_group, 1).flatten(0, 2))
        if a.qk_norm:
            for letter in "qk":
                own[f"self_attention.{letter}_layernorm.weight"] = tensors[f"{at}self_attn.{letter}_norm.weight"]
        own["self_attention.linear_proj.weight"] = tensors[f"{at}self_attn.o_proj.weight"].chunk(grid.tensor, 1)[tensor]
        own["input_layernorm.weight"] = tensors[f"{at}input_layernorm.weight"]
        own["pre_mlp_layernorm.weight"] = tensors[f"{at}post_attention_layernorm.weight"]
        if not a.num_experts:
            halves = [rows(tensors[f"{at}mlp.{half}_proj.weight"]) for half in ("gate", "up")]
            own["mlp.linear_fc1.weight"] = torch.cat(halves)
            own["mlp.linear_fc2.weight"] = tensors[f"{at}mlp.down_proj.weight"].chunk(grid.tensor, 1)[tensor]
            return own
        own["mlp.router.weight"] = tensors[f"{at}mlp.gate.weight"]
        gates_and_ups = tensors[f"{at}mlp.experts.gate_up_proj"].chunk(grid.expert)[expert]
        downs = tensors[f"{at}mlp.experts.down_proj"].chunk(grid.expert)[expert]
        for index, (gate_and_up, down) in enumerate(zip(gates_and_ups, downs, strict=True)):
            halves = [half.chunk(grid.expert_tensor)[expert_tensor] for half in gate_and_up.chunk(2)]
            own[f"mlp.experts.local_experts.{index}.linear_fc1.weight"] = torch.cat(halves)
            own[f"mlp.experts.local_experts.{index}.linear_fc2.weight"] = down.chunk(grid.expert_tensor, 1)[
                expert_tensor
            ]
        return own

    sizes = part_sizes(a.num_layers, grid.pipeline * grid.virtual_stages)
    parts: list[dict[str, Tensor]] = []
    for number in range(stage, len(sizes), grid.pipeline):
        part: dict[str, Tensor] = {}
        if number == 0:
            part["embedding.word_embeddings.weight"] = vocabulary(tensors["model.embed_tokens.weight"])
        for index in range(sizes[number]):
            own = layer(f"model.layers.{sum(sizes[:number]) + index}.")
            part |= {f"decoder.layers.{index}.{name}": value for name, value in own.items()}
        if number == len(sizes) - 1:
            part["decoder.final_layernorm.weight"] = tensors["model.norm.weight"]
            if critic:
                part["value_head.weight"] = tensors["lm_head.weight"]
            elif not a.tied:
                part["output_layer.weight"] = vocabulary(tensors["lm_head.weight"])
            elif len(sizes) > 1:
                part["output_layer.weight"] = vocabulary(tensors["model.embed_tokens.weight"])
        parts.append(part)
    return parts


@settings(max_examples=25, deadline=None)
@given(divided(), st.booleans())
def test_parts_are_what_cutting_whole_tensors_gives(case: tuple[Architecture, Grid], critic: bool) -> None:
    architecture, grid = case
    tensors = numbered(architecture, critic=critic)
    for rank in range(grid.ranks):
        found = made_of_parts(architecture, grid, rank, tensors, critic=critic)
        expected = made_by_cutting(architecture, grid, rank, tensors, critic=critic)
        assert [part.keys() for part in found] == [part.keys() for part in expected]
        for one, other in zip(found, expected, strict=True):
            for name, values in one.items():
                assert torch.equal(values, other[name]), (rank, name)


@settings(max_examples=25, deadline=None)
@given(divided(), st.booleans())
def test_every_value_is_held_once_by_each_set_of_ranks_that_holds_the_model(
    case: tuple[Architecture, Grid], critic: bool
) -> None:
    architecture, grid = case
    held: Counter[tuple[str, bool]] = Counter()
    counts = {name: torch.zeros(shape) for name, shape in whole_shapes(architecture, critic=critic).items()}
    expected: dict[str, int] = {}
    for rank in range(grid.ranks):
        for parameters in held_parameters(architecture, grid, grid.place(rank), critic=critic):
            for parameter in parameters.values():
                end = 0
                for part in parameter.parts:
                    assert part.begin == end
                    end = part.end
                    held[part.name, parameter.is_copy] += 1
                    if parameter.is_copy:
                        continue
                    counts[part.name][tuple(map(slice, part.box.offset, part.box.end))] += 1
                    across = grid.expert * grid.expert_tensor if parameter.is_expert else grid.tensor
                    copies = grid.ranks_of_stage // (across if parameter.is_divided else 1)
                    assert expected.setdefault(part.name, copies) == copies
                padding = torch.Size(parameter.shape).numel() - end
                assert padding == 0 or parameter.shape[0] == padded_vocabulary(architecture, grid) // grid.tensor
    for name, count in counts.items():
        assert torch.equal(count, torch.full_like(count, expected[name])), name
    # The embedding lies on two stages where the last one needs it too, and counts on the first.
    is_twice = architecture.tied and not critic and grid.pipeline * grid.virtual_stages > 1
    assert any(is_copy for _, is_copy in held) == is_twice


@settings(max_examples=30, deadline=None)
@given(divided())
def test_ranks_stand_where_megatron_puts_them(case: tuple[Architecture, Grid]) -> None:
    _, grid = case
    usual = RankGenerator(grid.tensor, 1, grid.data, grid.pipeline, grid.context, "tp-cp-ep-dp-pp")
    experts = RankGenerator(grid.expert_tensor, grid.expert, grid.expert_data, grid.pipeline, 1, "tp-cp-ep-dp-pp")
    for generator, kinds in (
        (usual, {"tp": "tensor", "cp": "context", "dp": "data", "pp": "pipeline"}),
        (experts, {"tp": "expert_tensor", "ep": "expert", "dp": "expert_data", "pp": "pipeline"}),
    ):
        for kind, field in kinds.items():
            for ranks in generator.get_ranks(kind):
                assert [getattr(grid.place(rank), field) for rank in ranks] == list(range(len(ranks)))


@given(st.integers(1, 200), st.integers(1, 32))
def test_layers_are_dealt_whole_and_evenly_with_light_ends(num_layers: int, num_parts: int) -> None:
    sizes = part_sizes(num_layers, num_parts)
    assert sum(sizes) == num_layers
    assert max(sizes) - min(sizes) <= 1
    assert sizes[0] == min(sizes)
    if num_parts > 2:
        assert sizes[-1] == min(sizes) or min(sizes[1:]) == max(sizes)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_have_the_names_and_shapes_that_transformers_gives_them(family: str, tied: bool) -> None:
    config = tiny_config(family, tie_word_embeddings=tied)
    architecture = read_architecture(config)
    causal = tiny_causal(config)
    assert whole_shapes(architecture) == {name: value.shape for name, value in causal.named_parameters()}
    assert whole_shapes(architecture, critic=True)["lm_head.weight"] == (1, architecture.hidden)


def test_a_vocabulary_is_padded_to_equal_shares_and_no_more() -> None:
    architecture = read_architecture(tiny_config("llama", vocab_size=5))
    assert [padded_vocabulary(architecture, Grid(size, size)) for size in (1, 2, 4)] == [5, 6, 8]
    grid = Grid(4, 4)
    embeddings = [held_parameters(architecture, grid, grid.place(rank))[0] for rank in range(4)]
    parts = [parameters["embedding.word_embeddings.weight"].parts for parameters in embeddings]
    assert [[part.box.shape[0] for part in own] for own in parts] == [[2], [2], [1], []]
