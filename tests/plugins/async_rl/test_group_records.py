"""Finished groups survive a checkpoint bit for bit."""

from __future__ import annotations

import tracemalloc
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline.run.checkpoints.state_files import read_state, write_state
from spurline_async_rl.source import recordings
from spurline_async_rl.source.recordings import groups_of, groups_state
from spurline_rl.trajectory import Group, Trajectory, Turn, turns_of

FIELDS = ("prompt_ids", "response_ids", "loss_mask", "logprobs", "versions", "rewards", "routed_experts")
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5)
    response = draw(tokens)
    count = len(response)
    prompt = draw(tokens)

    def column(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.none() | st.lists(values, min_size=count, max_size=count)

    experts = np.arange((len(prompt) + count) * 4).reshape(len(prompt) + count, 2, 2)
    return Turn(
        prompt_ids=np.array(prompt),
        response_ids=np.array(response),
        loss_mask=np.array(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))),
        logprobs=draw(column(floats)),
        versions=draw(column(st.integers(0, 1000))),
        rewards=draw(column(floats)),
        routed_experts=experts if draw(st.booleans()) else None,
        finish_reason=draw(st.sampled_from(["stop", "length", "abort", "error"])),
    )


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    info = st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.integers() | st.lists(st.integers()))
    rewards = st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False))
    return [
        Group(
            f"rows:{number}@{number}",
            number,
            tuple(
                Trajectory(
                    f"rows:{number}@{number}",
                    sample,
                    tuple(draw(st.lists(turns(), min_size=1, max_size=2))),
                    draw(rewards),
                    draw(info),
                )
                for sample in range(draw(st.integers(1, 2)))
            ),
        )
        for number in range(draw(st.integers(0, 3)))
    ]


def assert_same(restored: list[Group], originals: list[Group]) -> None:
    assert [(group.uid, group.draw) for group in restored] == [(group.uid, group.draw) for group in originals]
    for group, original in zip(restored, originals, strict=True):
        for mine, other in zip(group.trajectories, original.trajectories, strict=True):
            assert (mine.uid, mine.sample, mine.rewards) == (other.uid, other.sample, other.rewards)
            assert mine.info == other.info
            assert len(mine.turns) == len(other.turns)
    for turn, original in zip(turns_of(restored), turns_of(originals), strict=True):
        assert turn.finish_reason == original.finish_reason
        for name in FIELDS:
            value, expected = getattr(turn, name), getattr(original, name)
            assert (value is None) == (expected is None), name
            if value is not None:
                assert value.dtype == expected.dtype
                assert value.tobytes() == expected.tobytes()
                assert value.shape == expected.shape


@given(originals=groups(), num_bytes=st.integers(1, 200))
@settings(max_examples=30)
def test_groups_come_back_from_blocks_of_any_size(originals: list[Group], num_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        patch.setattr(recordings, "_BLOCK_BYTES", num_bytes)
        write_state(Path(folder) / "groups", groups_state(originals))
        assert_same([*groups_of(read_state(Path(folder) / "groups"))], originals)


def test_writing_a_full_buffer_takes_little_memory_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_BLOCK_BYTES", 1 << 20)
    tokens = 2**12
    columns = (np.zeros(tokens, dtype) for dtype in (np.int32, np.uint8, np.float32, np.int32, np.float32))
    turn = Turn(np.ones(8, np.int32), *columns)
    originals = [
        Group(f"u@{draw}", draw, tuple(Trajectory(f"u@{draw}", sample, (turn,)) for sample in range(16)))
        for draw in range(32)
    ]
    tracemalloc.start()
    write_state(tmp_path / "groups", groups_state(originals))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= 0.1 * 32 * 16 * tokens * 17
    assert len([*(tmp_path / "groups.parts").rglob("*.safetensors")]) > 10
    assert_same([*groups_of(read_state(tmp_path / "groups"))], originals)


def test_groups_are_read_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_BLOCK_BYTES", 1)
    turn = Turn(np.array([1]), np.array([2]), np.array([1]))
    write_state(
        tmp_path / "groups", groups_state([Group(f"u@{n}", n, (Trajectory(f"u@{n}", 0, (turn,)),)) for n in range(4)])
    )
    seen: list[weakref.ref[Group]] = []
    for group in groups_of(read_state(tmp_path / "groups")):
        assert sum(earlier() is not None for earlier in seen) <= 1, "beside this one, the one before at most"
        seen.append(weakref.ref(group))
    assert len(seen) == 4


def test_groups_of_earlier_checkpoints_are_read(tmp_path: Path) -> None:
    turn = Turn(np.array([1, 2]), np.array([3, 4, 5]), np.array([1, 1, 0]), logprobs=np.array([-0.1, -0.2, -0.3]))
    group = Group("rows:7@9", 9, (Trajectory("rows:7@9", 0, (turn, turn), {"right": 0.1}, {"prompt": "é"}),))
    blocks: Any = groups_state([group])["blocks"]
    # All groups were one block then, it was the state, and each turn had a prompt of its own.
    block = {**next(iter(blocks)), "version": 3}
    assert block.pop("prompts")["values"].tolist() == [1, 2]
    block["fields"] |= {"prompt_ids": {"lengths": np.array([2, 2]), "values": np.array([1, 2, 1, 2], np.int32)}}
    write_state(tmp_path / "groups", block)
    assert_same([*groups_of(read_state(tmp_path / "groups"))], [group])


def test_what_an_environment_logs_may_be_anything() -> None:
    turn = Turn(np.array([1]), np.array([2]), np.array([1]))
    odd = {"path": Path("/a"), "array": {"__array__": "0"}}
    group = Group("u@0", 0, (Trajectory("u@0", 0, (turn,), {}, odd),))
    [restored] = groups_of(groups_state([group]))
    assert restored.trajectories[0].info == {"path": "/a", "array": {"__array__": "0"}}
