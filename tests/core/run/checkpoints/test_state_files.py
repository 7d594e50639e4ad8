"""State in a checkpoint: arrays under the names of their keys, and what cannot be saved is said with its place."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from spurline.errors import RunFailedError
from spurline.protocols.stateful import StateParts
from spurline.run.checkpoints.state_files import read_state, write_state

ARRAY = np.arange(6, dtype=np.float32).reshape(2, 3)


def equal(left: Any, right: Any) -> bool:
    """Nested states are the same, arrays bit for bit with their dtypes."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, StateParts):
        return isinstance(right, StateParts) and equal(list(left), list(right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return left == right


def parts_of(parts: list[dict[str, Any]]) -> StateParts:
    return StateParts(lambda: iter(parts))


def test_arrays_in_a_checkpoint_have_the_names_of_their_keys(tmp_path: Path) -> None:
    state = {"weights": {"model.embed": ARRAY, "head": ARRAY + 1}, "groups": [{"tokens": np.array([3])}], "n": 4}
    write_state(tmp_path / "average", state)
    saved = load_file(tmp_path / "average.safetensors")
    assert sorted(saved) == ["groups/0/tokens", "weights/head", "weights/model.embed"]
    assert equal(saved["weights/head"], ARRAY + 1)
    assert equal(read_state(tmp_path / "average"), state)


@pytest.mark.parametrize(
    "state",
    [
        {"a": {"b": ARRAY}, "a/b": ARRAY + 1, "a/b~2": ARRAY + 2},
        {"__metadata__": ARRAY, "": ARRAY + 1},
        {"": {"": ARRAY}, "/": ARRAY + 1},
        {"ü \n 字": ARRAY, "\ud800": ARRAY + 1, "?": ARRAY + 2},
        {"0": ARRAY, "list": [ARRAY, [ARRAY + 1, None, "x", 1.5, True]]},
        {"scalar": np.float64(3.5) * np.ones(()), "empty": np.zeros((0, 3), np.int64), "flags": np.array([True])},
    ],
    ids=["collision", "reserved", "slashes", "odd", "lists", "shapes"],
)
def test_odd_and_colliding_keys_come_back_as_they_were(tmp_path: Path, state: dict[str, Any]) -> None:
    write_state(tmp_path / "odd", state)
    assert equal(read_state(tmp_path / "odd"), state)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, torch.zeros(2)]}}, r"a/b/1 is a torch\.Tensor"),
        ({"a": {3: 1}}, "a has the key 3, which is not text"),
        ({"a": {"__array__": "0"}}, "a has the key '__array__'"),
        ({"a": {"__parts__": 0}}, "a has the key '__parts__'"),
        ({"a": parts_of([{}, {"b": {1, 2}}])}, r"a/1/b is a builtins\.set"),
        ({"a": np.array(["text"])}, "a is an array of <U4"),
        ({"a": np.array([object()])}, "a is an array of object"),
        ({"a": {1, 2}}, r"a is a builtins\.set"),
        ({"a": np.int64(3)}, r"a is a numpy\.int64"),
        ([1, 2], "it is a list"),
        (None, "it is a NoneType"),
    ],
)
def test_what_cannot_be_saved_is_named_with_the_way_to_it(tmp_path: Path, state: Any, message: str) -> None:
    with pytest.raises(
        RunFailedError, match=f"^The state of kind/name cannot be saved: {message}.*numpy arrays of numbers"
    ):
        write_state(tmp_path / "kind" / "name", state)


def states(depth: int) -> st.SearchStrategy[dict[str, Any]]:
    """Nested states whose parts have parts, `depth` times."""
    leaves = st.integers() | st.text(max_size=3) | st.sampled_from([ARRAY, ARRAY[:0], np.array([True])])
    if depth > 0:
        leaves |= st.lists(states(depth - 1), max_size=3).map(parts_of)
    return st.dictionaries(st.text(max_size=3), leaves | st.lists(leaves, max_size=2), max_size=3)


@given(before=states(1), state=states(2))
@settings(max_examples=12)
def test_parts_come_back_bit_for_bit_and_nothing_of_what_they_replace(
    before: dict[str, Any], state: dict[str, Any]
) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kind" / "name.v1"
        write_state(path, before)
        write_state(path, state)
        assert equal(read_state(path), state)
        again = Path(folder) / "again" / "name"
        write_state(again, read_state(path))
        assert equal(read_state(again), state)
        old, new = (sorted(file.relative_to(top.parent) for file in top.parent.rglob("0*")) for top in (path, again))
        assert [str(file).replace("name.v1", "name") for file in old] == [str(file) for file in new]


def test_parts_are_never_in_memory_together(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> Iterator[dict[str, object]]:
        for number in range(40):
            made.append(number)
            yield {"tokens": np.full(1 << 18, number, np.int32)}

    tracemalloc.start()
    write_state(tmp_path / "groups", {"parts": StateParts(make)})
    parts: Any = read_state(tmp_path / "groups")["parts"]
    assert [int(part["tokens"][-1]) for part in parts] == list(range(40))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made == list(range(40)), "each part is made once"
    assert peak <= 0.1 * 40 * (1 << 20)
