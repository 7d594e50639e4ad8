"""Planning equals core's plain Python, and compiled code is cached where that is possible."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spurline_collation_fast
from spurline.data.collators.packing import PackingAlgorithm, pack, straggler_factor
from spurline_collation_fast.collators import pack_rows

ALGORITHMS = get_args(PackingAlgorithm)
# Rows of 20 tokens where first fit, best fit or evening out once differed: lengths, ranks.
AWKWARD = [
    ([1, 1, 1, 3, 3, 2, 1, 1, 1, 2, 2], 2),
    ([4, 6, 6, 2, 7, 7, 9, 8], 2),
    ([7, 8, 3, 9, 1, 1, 9, 9, 3, 2], 2),
    ([9, 2, 4, 4, 5, 1, 3, 4], 4),
    ([3, 1, 3, 3, 3, 1], 4),
    ([1, 1, 1], 4),
    ([11] * 5 + [3] * 3, 1),
    ([3, 0, 2, 0, 4], 2),
    ([17, 12, 16, 9, 17, 12, 7, 1], 2),
    ([12, 8, 7, 7, 7, 6, 6, 3, 3, 2, 2, 1, 1, 1], 3),
    ([2, 2, 2, 9, 9, 1, 1, 1, 1], 5),
    ([10] * 10, 1),
    ([], 2),
    ([17, 15, 4, 1], 1),
    ([20, 20], 3),
]


def assert_equal_to_core(lengths: list[int], capacity: int, ranks: int, algorithm: PackingAlgorithm) -> None:
    positions, offsets, columns, longest, straggler = pack_rows(
        np.array(lengths, np.int64), 1, capacity, ranks, algorithm
    )
    assert positions.dtype == offsets.dtype == columns.dtype == np.int64
    found, starts = ([part.tolist() for part in np.split(table, offsets[1:-1])] for table in (positions, columns))
    rows = pack(lengths, capacity, ranks, algorithm)
    ends = [list(itertools.accumulate((lengths[position] for position in row), initial=0)) for row in rows]
    used = [row[-1] for row in ends]
    assert found == rows
    assert starts == [row[:-1] for row in ends]
    assert (longest, straggler) == (max(used), straggler_factor(used, ranks))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(lengths=st.lists(st.integers(0, 50), max_size=80), capacity=st.integers(50, 130), ranks=st.integers(1, 9))
@settings(max_examples=150)
def test_rows_equal_the_reference(algorithm: PackingAlgorithm, lengths: list[int], capacity: int, ranks: int) -> None:
    assert_equal_to_core(lengths, capacity, ranks, algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_awkward_and_large_batches_equal_the_reference(algorithm: PackingAlgorithm) -> None:
    for lengths, ranks in AWKWARD:
        assert_equal_to_core(lengths, 20, ranks, algorithm)
    many = np.random.default_rng(0).integers(1, 8193, 1500).tolist()
    for capacity in (8192, 1 << 16, 100_000):
        assert_equal_to_core(many, capacity, 8, algorithm)


def run_python(code: str, environment: dict[str, str]) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=180
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


COMPILE = """
import numpy, spurline_collation_fast
from spurline_collation_fast.kernels.compiled import write_values
none = numpy.zeros(1, numpy.int64)
write_values(none, none, none, none, none, none, numpy.zeros(2, numpy.int64), numpy.zeros((1, 1), numpy.int64))
stats = write_values.stats
print(spurline_collation_fast.__file__, sum(stats.cache_hits.values()), "hits", sum(stats.cache_misses.values()))
"""


def copied_package(folder: Path) -> tuple[Path, dict[str, str]]:
    """A copy of the package without compiled code, and the environment in which a process takes it."""
    source = Path(spurline_collation_fast.__file__).parent
    copy = folder / "site" / "spurline_collation_fast"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    paths = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    return copy, {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "XDG_CACHE_HOME": str(folder / "user"),
        "NUMBA_CACHE_DIR": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@pytest.mark.slow
def test_code_is_compiled_once_and_again_when_the_loops_change(tmp_path: Path) -> None:
    copy, environment = copied_package(tmp_path)
    assert run_python(COMPILE, environment).endswith(" 0 hits 1")
    assert run_python(COMPILE, environment).endswith(" 1 hits 0")
    with (copy / "kernels" / "loops.py").open("a") as file:
        file.write("# changed\n")
    assert run_python(COMPILE, environment).endswith(" 0 hits 1")


@pytest.mark.slow
def test_code_is_cached_for_the_user_when_the_package_folder_cannot_be_written(tmp_path: Path) -> None:
    copy, environment = copied_package(tmp_path)
    # A file in the way of the cache folder refuses writing to everyone, also to root.
    (copy / "kernels" / "__pycache__").write_text("")
    first, second = run_python(COMPILE, environment), run_python(COMPILE, environment)
    assert first.startswith(str(copy))
    assert list((tmp_path / "user").rglob("*.nbi")), "nothing was cached for the user"
    assert first.endswith(" 0 hits 1"), first
    assert second.endswith(" 1 hits 0"), second
