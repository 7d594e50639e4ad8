"""Whole tensors come together out of the ranks' parts, bit for bit, where they are wanted and nowhere else.

Ranks of a pipeline make buckets of what their own stage holds, and no weight passes another stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_gathering import whole_tensors
from megatron_models import divided
from recording_makers import choice_of, record
from safetensors.torch import load_file

from spurline.protocols.ranks import RankRequest
from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import held_parameters
from spurline_megatron_backend.weight_gathering import box_owners
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_ranks.group import RankGroup, TimeLimits, open_ranks
from spurline_ranks.pieces import Box
from spurline_ranks.publishing import buckets_of_ranks
from spurline_rl.testing.backend_cases import assert_weights_equal

ROUND_BYTES = 9_000
"""Less than a tensor of the models here, more than most parts of one."""

Start = Callable[[int], RankGroup]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Gives ranks that wait for something to hold, the same for each number."""
    groups: dict[int, RankGroup] = {}

    def start(count: int) -> RankGroup:
        if count not in groups:
            worker, limits = "megatron_gathering:GatheringWorker", TimeLimits(120.0, 60.0, 60.0)
            groups[count] = open_ranks(RankRequest(count, num_threads=1), worker, (), limits)
        return groups[count]

    yield start
    for group in groups.values():
        group.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "dense": write_tiny_model(folder / "dense", num_hidden_layers=3),
        "four": write_tiny_model(folder / "four", num_hidden_layers=4),
        "tied": write_tiny_model(folder / "tied", num_hidden_layers=4, tie_word_embeddings=True),
        "experts": write_tiny_moe_model(folder / "experts", num_hidden_layers=2),
    }


def hold(ranks: RankGroup, model: Path, grid: Grid, *, critic: bool = False) -> dict[str, np.ndarray]:
    """What the ranks hold parts of from now on."""
    ranks.call("hold", str(model), asdict(grid), critic, ROUND_BYTES)
    return {name: value.numpy() for name, value in whole_tensors(model, critic=critic).items()}


def hold_files(ranks: RankGroup, model: Path, grid: Grid) -> dict[str, torch.Tensor]:
    """What the ranks hold parts of from now on, under the names of files."""
    hold(ranks, model, grid)
    return load_file(model / "model.safetensors")


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not np.array_equal(found[name], expected[name])] == []


CASES = [
    ("dense", Grid(2, tensor=2)),
    ("dense", Grid(2, pipeline=2)),
    ("dense", Grid(2, context=2)),
    ("dense", Grid(4, tensor=2, pipeline=2)),
    ("tied", Grid(2, tensor=2)),
    ("tied", Grid(2, pipeline=2, virtual_stages=2)),
    ("tied", Grid(4, pipeline=4)),
    ("experts", Grid(2, expert=2)),
    ("experts", Grid(2, tensor=2, expert_tensor=2)),
    ("experts", Grid(4, tensor=2, expert=2)),
    ("experts", Grid(4, pipeline=2, expert=2)),
    ("experts", Grid(4, expert=2, expert_tensor=2)),
]


@pytest.mark.processes
@pytest.mark.parametrize(("model", "grid"), CASES, ids=lambda value: value if isinstance(value, str) else repr(value))
def test_the_last_rank_alone_gets_all_tensors_of_the_model(
    start: Start, models: dict[str, Path], model: str, grid: Grid
) -> None:
    ranks = start(grid.ranks)
    expected = hold(ranks, models[model], grid)
    answers = ranks.call("gather", {grid.ranks - 1: [*expected]})
    assert_same(answers[-1][0], expected)
    for rank, (found, messages) in enumerate(answers[:-1]):
        assert found == {}
        assert {(kind, peer) for kind, peer, _ in messages} <= {("isend", grid.ranks - 1)}, rank


@pytest.mark.processes
def test_every_value_travels_once_at_most_and_none_to_its_owner(start: Start, models: dict[str, Path]) -> None:
    ranks = start(4)
    expected = hold(ranks, models["dense"], Grid(4, tensor=2))
    [_, *others] = ranks.call("gather", {0: [*expected]})
    sent = [sum(size for _, _, size in messages) for _, messages in others]
    norms = sum(value.nbytes for name, value in expected.items() if "norm" in name)
    rows = 32 * 4 * 2  # of the embedding and the output layer, which are one more of the first half
    divided = sum(value.nbytes for value in expected.values()) - norms
    assert sent == [(divided - rows) // 2, 0, 0]


@pytest.mark.processes
def test_a_rank_receives_no_more_at_a_time_than_it_is_allowed(start: Start, models: dict[str, Path]) -> None:
    ranks = start(2)
    expected = hold(ranks, models["experts"], Grid(2, expert=2))
    messages = ranks.call("gather", {1: [*expected]})[1][1]
    sizes = [size for kind, _, size in messages if kind == "irecv"]
    assert len(sizes) > 10
    # The embedding is one part.
    assert sorted(sizes)[-3] <= ROUND_BYTES < max(sizes) == expected["lm_head.weight"].nbytes


@pytest.mark.processes
def test_several_ranks_get_different_tensors_at_once_and_other_ranks_none(
    start: Start, models: dict[str, Path]
) -> None:
    ranks = start(4)
    expected = hold(ranks, models["experts"], Grid(4, tensor=2, pipeline=2, expert=2))
    names = sorted(expected)
    wanted = {3: names[::3], 0: names[1::2], 2: names[:1]}
    for rank, (found, _) in enumerate(ranks.call("gather", wanted)):
        assert_same(found, {name: expected[name] for name in wanted.get(rank, ())})
    assert [found for found, _ in ranks.call("gather", {})] == [{}, {}, {}, {}]


@pytest.mark.processes
def test_a_critic_has_its_value_head(start: Start, models: dict[str, Path]) -> None:
    ranks = start(2)
    expected = hold(ranks, models["tied"], Grid(2, pipeline=2), critic=True)
    assert expected["lm_head.weight"].shape == (1, 32)
    assert_same(ranks.call("gather", {0: [*expected]})[0][0], expected)


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rank_needs_memory_for_what_it_wants_and_one_round_and_an_owner_for_one_round(
    start: Start, models: dict[str, Path], dtype: str
) -> None:
    ranks, width = start(2), getattr(torch, dtype).itemsize
    expected = hold(ranks, models["experts"], Grid(2, tensor=2, expert_tensor=2))
    layer = [name for name in expected if ".layers.1." in name]
    owner, wanting = ranks.call("peak_of_gathering", {1: layer}, dtype)
    wanted = sum(expected[name].size for name in layer) * width
    assert wanted > 4 * ROUND_BYTES
    assert ROUND_BYTES / 2 < owner <= ROUND_BYTES
    assert wanted + ROUND_BYTES / 2 < wanting <= wanted + ROUND_BYTES


@pytest.mark.processes
@pytest.mark.parametrize(("model", "grid"), [("tied", Grid(2, pipeline=2)), ("experts", Grid(2, expert=2))], ids=repr)
def test_files_take_the_memory_of_the_weights_that_leave_together_and_what_is_made_of_them(
    start: Start, models: dict[str, Path], model: str, grid: Grid, tmp_path: Path
) -> None:
    ranks = start(2)
    expected = hold(ranks, models[model], grid)
    peaks = ranks.call("peak_of_writing", str(tmp_path), "float32", 40_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    written = {name: value for file in files for name, value in load_file(file).items()}
    whole = load_file(models[model] / "model.safetensors")
    assert_same({name: value.numpy() for name, value in written.items()}, {k: v.numpy() for k, v in whole.items()})
    # The experts of a layer, and the same again as files have them.
    experts = [value.nbytes for name, value in expected.items() if ".layers.0.mlp.experts." in name]
    largest = max(2 * sum(experts), *(value.nbytes for value in expected.values()))
    # The embedding is one part of a stage.
    in_flight = max(ROUND_BYTES, expected["model.embed_tokens.weight"].nbytes if grid.pipeline > 1 else 0)
    assert max(peaks) <= largest + in_flight < sum(value.nbytes for value in expected.values()) / 2


STAGES = [
    ("four", Grid(4, pipeline=2)),
    ("tied", Grid(4, tensor=2, pipeline=2)),
    ("experts", Grid(4, pipeline=2, expert=2)),
]


@pytest.mark.processes
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize(("model", "grid"), STAGES, ids=["stages", "tied-stages", "stages-of-experts"])
def test_each_stage_sends_its_own_weights_once_and_nothing_passes_another_stage(
    start: Start, models: dict[str, Path], model: str, grid: Grid, dtype: str | None
) -> None:
    ranks = start(4)
    expected = hold_files(ranks, models[model], grid)
    if dtype is not None:
        expected = {name: value.to(getattr(torch, dtype)) for name, value in expected.items()}
    found = record(buckets_of_ranks(ranks, 1, choice_of(made_by="owners", dtype=dtype)))
    assert_weights_equal(found.weights, expected)
    assert {value.dtype for value in found.weights.values()} == {getattr(torch, dtype or "float32")}
    assert sum(found.sizes) == sum(value.nbytes for value in expected.values())
    # Each bucket from one sender, both have some, and two processes make them all.
    assert {tuple(senders) for senders in found.senders} == {("0",), ("1",)}
    assert len(found.processes) == 2
    assert found.told == {2}
    received = {
        (peer, rank)
        for rank, messages in enumerate(ranks.call("messages"))
        for kind, peer, _ in messages
        if kind == "irecv"
    }
    # The first rank of each stage is sent what the others of that stage hold, if they hold anything else.
    within = {(1, 0), (3, 2)}
    assert received == (set() if grid.tensor * grid.expert == 1 else within)


@pytest.mark.processes
def test_the_first_rank_alone_is_sent_everything_where_it_makes_all_buckets(
    start: Start, models: dict[str, Path]
) -> None:
    ranks = start(4)
    expected = hold_files(ranks, models["four"], Grid(4, pipeline=2))
    found = record(buckets_of_ranks(ranks, 1, choice_of()))
    assert_weights_equal(found.weights, expected)
    assert {tuple(senders) for senders in found.senders} == {("None",)}
    received, *others = ([size for kind, _, size in messages if kind == "irecv"] for messages in ranks.call("messages"))
    of_others = [
        name for name in expected if ".layers.2." in name or ".layers.3." in name or name.startswith("lm_head")
    ]
    assert sum(received) == sum(expected[name].nbytes for name in [*of_others, "model.norm.weight"])
    assert others == [[], [], []]


@pytest.mark.processes
@pytest.mark.parametrize("made_by", ["first", "owners", "all"])
def test_a_rank_that_makes_buckets_ahead_holds_two_of_them(start: Start, models: dict[str, Path], made_by: str) -> None:
    ranks = start(4)
    expected = hold_files(ranks, models["four"], Grid(4, pipeline=2))
    largest = max(value.nbytes for value in expected.values())
    choice = choice_of(largest, made_by=made_by)
    keeping = asdict(choice) | {"maker": "recording_makers:PackingMaker", "settings": {}}
    peaks = ranks.call("peak_of_making", keeping)
    assert max(peaks) >= 1.5 * largest
    # Its packed bucket and the next one, and what is under way: a round of parts, or the one part of the embedding.
    assert max(peaks) <= 3 * largest
    made = {"first": {0}, "owners": {0, 2}, "all": {0, 1, 2, 3}}[made_by]
    assert all(peak <= largest for rank, peak in enumerate(peaks) if rank not in made)


@given(divided(), st.booleans())
def test_the_first_rank_that_holds_a_value_owns_it(layout: tuple[Architecture, Grid], critic: bool) -> None:
    architecture, grid = layout
    owners = box_owners(architecture, grid, critic=critic)
    first = {name: np.full(shape, -1) for name, shape in owners.shapes.items()}
    for rank in reversed(range(grid.ranks)):
        for parameters in held_parameters(architecture, grid, grid.place(rank), critic=critic):
            for parameter in parameters.values():
                for part in () if parameter.is_copy else parameter.parts:
                    first[part.name][part.box.slices_in(Box.whole(part.shape))] = rank
    claimed = {name: np.zeros(shape, dtype=int) for name, shape in owners.shapes.items()}
    for name, boxes in owners.boxes.items():
        for box in boxes:
            where = box.box.slices_in(Box.whole(owners.shapes[name]))
            assert (first[name][where] == box.owner).all()
            claimed[name][where] += 1
    assert all((count == 1).all() for count in claimed.values())


@given(divided())
def test_a_tensor_is_brought_most_cheaply_to_who_holds_most_of_it_which_is_in_its_stage(
    layout: tuple[Architecture, Grid],
) -> None:
    architecture, grid = layout
    owners = box_owners(architecture, grid)
    for name, boxes in owners.boxes.items():
        owner = owners.most_of([name])
        held = [sum(part.box.num_values for part in boxes if part.owner == rank) for rank in range(grid.ranks)]
        assert owner == held.index(max(held))
        assert {grid.place(part.owner).pipeline for part in boxes} == {grid.place(owner).pipeline}


@given(divided(), st.integers(1, 400))
def test_rounds_hold_every_part_once_and_no_more_than_they_may(
    layout: tuple[Architecture, Grid], max_bytes: int
) -> None:
    owners = box_owners(*layout)
    names = [*owners.shapes][::2]
    rounds = [*owners.rounds(names, torch.bfloat16, max_bytes)]
    parts: list[Any] = [part for taken in rounds for part in taken]
    assert len(parts) == len(set(parts))
    assert set(parts) == {part for name in names for part in owners.boxes[name]}
    for taken in rounds:
        assert taken
        assert len(taken) == 1 or sum(part.box.num_values for part in taken) * 2 <= max_bytes
