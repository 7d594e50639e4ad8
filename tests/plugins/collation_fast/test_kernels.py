"""Which kernels run, where their code is cached, and that all give the batches of the reference."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fast_kernels import dirty_first

import spurline_collation_fast
from spurline.data.batch import TrainingBatch
from spurline.data.collators.packed import PackedCollator
from spurline.data.collators.packing import PackingAlgorithm
from spurline.data.collators.padded import PaddedCollator
from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.protocols.collator import ParallelLayout
from spurline.testing.collator_contract import assert_batches_equal
from spurline.testing.samples import make_view
from spurline_collation_fast.collators import FastPackedCollator, FastPaddedCollator
from spurline_collation_fast.kernels import Kernels, best_kernels, kernels_named
from spurline_rl.testing.inputs import make_trajectories

PAD = 999


def padded(pad_side: str, lengths: list[int], ranks: int) -> Callable[[Kernels | None], TrainingBatch]:
    """One sample a row; fast with kernels, the reference without."""
    config = PaddedCollatorConfig.model_validate({"pad_side": pad_side})
    samples = make_view(lengths, 1)

    def collate(kernels: Kernels | None) -> TrainingBatch:
        arguments = (config, PAD, ParallelLayout(data=ranks))
        collator = FastPaddedCollator(*arguments, kernels) if kernels else PaddedCollator(*arguments)
        return collator.collate(samples, training=True)

    return collate


def packed(
    algorithm: PackingAlgorithm, lengths: list[int], ranks: int, align_to: int = 1, turns: Any = None
) -> Callable[[Kernels | None], TrainingBatch]:
    """Several samples, or turns, a row."""
    config = PackedCollatorConfig(max_tokens=20, algorithm=algorithm, align_to=align_to)
    samples, trajectories = make_view(lengths, 2), make_trajectories(turns or [], 3, routed_experts=True)

    def collate(kernels: Kernels | None) -> TrainingBatch:
        arguments = (config, PAD, ParallelLayout(data=ranks))
        collator = FastPackedCollator(*arguments, kernels) if kernels else PackedCollator(*arguments)
        return collator.collate_rollouts(trajectories) if turns else collator.collate(samples, training=True)

    return collate


MIXED = np.random.default_rng(5).integers(1, 21, 30).tolist()
CORPUS = [
    padded("right", [3, 1, 9, 2, 1], 2),
    padded("left", [3, 1, 9, 2, 1], 2),
    padded("right", [8, 9, 7, 9], 1),
    padded("left", [8, 9, 7, 9], 3),
    packed("ffd", MIXED, 4),
    packed("bfd", MIXED, 4),
    packed("multifit", MIXED, 4),
    packed("multifit", [1, 1, 1, 3, 3, 2, 1, 1, 1, 2, 2], 2),
    packed("multifit", [4, 6, 6, 2, 7, 7, 9, 8], 2),
    packed("multifit", [7, 8, 3, 9, 1, 1, 9, 9, 3, 2], 2),
    packed("multifit", [9, 2, 4, 4, 5, 1, 3, 4], 4),
    packed("multifit", [3, 1, 3, 3, 3, 1], 4),
    packed("multifit", [1, 1, 1], 4),
    packed("multifit", [11] * 5 + [3] * 3, 1),
    packed("ffd", [3, 0, 2, 0, 4], 2),
    packed("ffd", [17, 12, 16, 9, 17, 12, 7, 1], 2),
    packed("ffd", [1, 6, 3, 8, 20, 20, 15, 15, 5, 5], 2, align_to=4),
    packed("bfd", [12, 8, 7, 7, 7, 6, 6, 3, 3, 2, 2, 1, 1, 1], 3),
    packed("ffd", [2, 2, 2, 9, 9, 1, 1, 1, 1], 5),
    packed("ffd", [10] * 10, 1),
    packed("ffd", [11] * 5, 1),
    packed("ffd", [3, 4], 4),
    packed("bfd", [], 2),
    packed("bfd", [17, 15, 4, 1], 1),
    packed("ffd", [2, 2, 2, 2, 2], 4),
    packed("ffd", [20, 20], 3),
    packed("ffd", [10, 10, 10, 10], 3),
    packed("ffd", [], 2, align_to=4, turns=[[(3, 4), (0, 5)], [(2, 0), (1, 1)], [(0, 1)], [(9, 9)]]),
    packed("ffd", [], 2, align_to=2, turns=[[(0, 2), (1, 0)], [(0, 1)], [(9, 9)]]),
]


@pytest.mark.parametrize("name", ["numba", "numpy"])
def test_kernels_give_the_reference_on_batches_of_every_kind(name: str) -> None:
    for collate in CORPUS:
        assert_batches_equal(collate(dirty_first(kernels_named(name))), collate(None))


def test_kernels_are_compiled_where_numba_is_installed() -> None:
    assert best_kernels().name == "numba"


def run_python(code: str, environment: dict[str, str]) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.processes
def test_without_numba_the_numpy_kernels_are_taken() -> None:
    code = "import sys; sys.modules['numba'] = None\n"
    code += "from spurline_collation_fast.kernels import best_kernels; print(best_kernels().name)"
    assert run_python(code, {}) == "numpy"


COMPILE = """
import numpy, spurline_collation_fast
from spurline_collation_fast.kernels import kernels_named
write_values = kernels_named("numba").write_values
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
def test_a_disk_that_takes_no_code_costs_the_next_process_the_compilation_and_nothing_else(tmp_path: Path) -> None:
    copy, environment = copied_package(tmp_path)
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
    assert run_python(limit + COMPILE, environment).endswith(" 0 hits 1")
    assert list((copy / "kernels").rglob("*.nbc")) == []
    assert run_python(COMPILE, environment).endswith(" 0 hits 1")


@pytest.mark.slow
def test_code_is_compiled_again_when_any_source_of_the_kernels_changes(tmp_path: Path) -> None:
    copy, environment = copied_package(tmp_path)
    assert run_python(COMPILE, environment).endswith(" 0 hits 1")
    assert run_python(COMPILE, environment).endswith(" 1 hits 0")
    for changed in ("memory.py", "intrinsics.py", "loops.py", "fitting.py"):
        with (copy / "kernels" / changed).open("a") as file:
            file.write("# changed\n")
        assert run_python(COMPILE, environment).endswith(" 0 hits 1"), changed


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
