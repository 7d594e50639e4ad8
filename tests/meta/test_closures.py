"""A run imports the packages that it needs, and no others.

`python benchmarks/closures.py` prints how much each kind of run imports, to be compared over time.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def closures() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("closures")


def packages(names: frozenset[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_fine_tuning_imports_nothing_of_reinforcement_learning_nor_of_ranks_or_trackers(closures: ModuleType) -> None:
    run = closures.closure_of(closures.RUNS["SFT"]).run
    assert {"spurline.run.loop", "spurline_text.sources.sft", "spurline_models.local.backend"} <= run
    others = {f"spurline_{name}" for name in ("rl", "ranks", "agents", "async_rl", "trackers")}
    assert packages(run) & others == set()
