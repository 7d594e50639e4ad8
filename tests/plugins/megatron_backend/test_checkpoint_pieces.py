"""What the optimizers of any grid of ranks hold, those of any other read back bit for bit; without Megatron."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_shards import (
    DENSE,
    DENSE_GRIDS,
    EXPERT_GRIDS,
    EXPERTS,
    TIED,
    ShardedState,
    SimulatedRank,
    local_parameter,
    simulated_ranks,
    some_state,
)
from torch import Tensor

from spurline.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError
from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.checkpoint import join, pieces, read_owned, state_of
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import whole_shapes
from spurline_models.optimizers.state import OptimizerState, check_state
from spurline_ranks.pieces import Box, PieceIndex, write_pieces


def write(folder: Path, grid: Grid, ranks: list[SimulatedRank]) -> OptimizerState:
    """Every rank writes its part; returns the facts of the first."""
    states: list[OptimizerState] = []
    for rank in ranks:
        own = [owned for owned in rank.owned if owned.held.counts_on(grid.place(rank.rank).tensor)]
        states.append(state_of(own, "adamw"))
        write_pieces(folder, rank.rank, pieces(own), part_bytes=20_000)
    return join(states)


def saved_state(index: PieceIndex, facts: OptimizerState) -> OptimizerState:
    tensors = {
        key: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        for key, stored in index.tensors.items()
        if "/" in key
    }
    return OptimizerState.read(tensors, facts.facts())


def assert_holds(ranks: list[SimulatedRank], state: ShardedState) -> None:
    """Every rank has the very values of the state, and of padding 0."""
    for rank in ranks:
        for owned in rank.owned:
            wanted: dict[str, Tensor] = {"": local_parameter(owned.held, state.weights)}
            wanted |= {key: local_parameter(owned.held, whole) for key, whole in state.moments.items()}
            assert torch.equal(owned.values, wanted.pop("")[slice(*owned.span)])
            if not owned.held.parts:
                assert not owned.state
                continue
            assert owned.state.keys() == {*wanted, "step", "phase"}
            for key, whole in wanted.items():
                assert torch.equal(owned.state[key], whole[slice(*owned.span)]), (key, owned)
            assert torch.equal(owned.state["step"], torch.tensor(state.steps))
            assert owned.state["phase"] == 3


@st.composite
def resharding(draw: st.DrawFn) -> tuple[Architecture, Grid, Grid, bool, int]:
    architecture = draw(st.sampled_from([DENSE, TIED, EXPERTS]))
    grids = st.sampled_from(EXPERT_GRIDS if architecture.num_experts else DENSE_GRIDS)
    critic = draw(st.booleans()) and not architecture.tied
    return architecture, draw(grids), draw(grids), critic, draw(st.integers(0, 1 << 16))


@settings(max_examples=25, deadline=None)
@given(case=resharding())
def test_any_ranks_read_what_any_others_wrote(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[Architecture, Grid, Grid, bool, int]
) -> None:
    architecture, writers, readers, critic, seed = case
    folder, random = tmp_path_factory.mktemp("pieces"), Random(seed)
    state = some_state(architecture, seed, critic=critic)
    facts = write(folder, writers, simulated_ranks(architecture, writers, state, random, critic=critic))
    index = PieceIndex.of(folder)
    saved = saved_state(index, facts)
    shapes = whole_shapes(architecture, critic=critic)
    check_state(saved, "adamw", shapes, [])
    for name, whole in state.weights.items():
        assert torch.equal(index.read(name, Box.whole(whole.shape)), whole), name
    for key, moments in state.moments.items():
        for name, whole in moments.items():
            assert torch.equal(index.read(f"{name}/{key}", Box.whole(whole.shape)), whole), (name, key)
    assert index.tensors.keys() == {*shapes, *(f"{name}/{key}" for name in shapes for key in (*state.moments, "step"))}
    assert saved.values == {f"{name}/phase": 3 for name in shapes}
    ranks = simulated_ranks(architecture, readers, None, random, critic=critic)
    for rank in ranks:
        read_owned(index, saved, rank.owned)
    assert_holds(ranks, state)


def test_an_optimizer_without_state_yet_is_written_and_replaces_one_that_has_some(tmp_path: Path) -> None:
    state = some_state(DENSE, 1)
    grid = Grid(2, tensor=2)
    ranks = simulated_ranks(DENSE, grid, state, Random(0))
    for rank in ranks:
        for owned in rank.owned:
            owned.state.clear()
    facts = write(tmp_path, grid, ranks)
    index = PieceIndex.of(tmp_path)
    assert index.tensors.keys() == whole_shapes(DENSE).keys()
    (reader,) = simulated_ranks(DENSE, Grid(1), state, Random(0))
    read_owned(index, saved_state(index, facts), reader.owned)
    assert all(not owned.state for owned in reader.owned)


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, OptimizerState]:
    grid = Grid(4, tensor=2, expert=2)
    return tmp_path, write(tmp_path, grid, simulated_ranks(EXPERTS, grid, some_state(EXPERTS, 3), Random(3)))


def test_a_tensor_that_is_missing_altogether_is_found(written: tuple[Path, OptimizerState]) -> None:
    folder, facts = written
    index = PieceIndex.of(folder)
    left = {key: stored for key, stored in index.tensors.items() if key != "model.norm.weight/step"}
    saved = saved_state(PieceIndex(folder, left), facts)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight/step is missing"):
        check_state(saved, "adamw", whole_shapes(EXPERTS), [])


def test_files_of_another_layout_that_were_left_in_the_folder_are_found(written: tuple[Path, OptimizerState]) -> None:
    folder, _ = written
    grid = Grid(8, tensor=2, pipeline=2, expert=2)
    ranks = simulated_ranks(EXPERTS, grid, some_state(EXPERTS, 3), Random(5))
    other = ranks[7]
    own = [owned for owned in other.owned if owned.held.counts_on(grid.place(other.rank).tensor)]
    write_pieces(folder, other.rank, pieces(own))
    with pytest.raises(DamagedCheckpointError, match="is damaged"):
        PieceIndex.of(folder)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"history": [1, 2]}, r"optimizer 'odd' keeps `history` of model\.norm\.weight as list"),
        ({"rows": torch.zeros(3)}, r"`rows` of model\.norm\.weight as Tensor"),
        ({"a/b": 1}, r"under the key 'a/b'"),
    ],
)
def test_state_that_a_checkpoint_cannot_hold_is_refused_by_name(kept: Mapping[str, Any], message: str) -> None:
    (rank,) = simulated_ranks(DENSE, Grid(1), some_state(DENSE, 1), Random(0))
    owned = next(it for it in rank.owned if it.held.parts[0].name == "model.norm.weight")
    owned.state.update(kept)
    with pytest.raises(CheckpointWriteError, match=message):
        state_of([owned], "odd")


def test_copies_and_padding_are_not_written_and_every_rank_writes_its_own_values_only(tmp_path: Path) -> None:
    grid = Grid(8, tensor=2, pipeline=2, context=2)
    state = some_state(TIED, 2)
    write(tmp_path, grid, simulated_ranks(TIED, grid, state, Random(2)))
    num_values = sum(
        piece.span[1] - piece.span[0]
        for key, stored in PieceIndex.of(tmp_path).tensors.items()
        for piece in stored.pieces
        if "/" not in key
    )
    assert num_values == sum(whole.numel() for whole in state.weights.values())
