"""A rank that fails is named while the others wait for it, in a pipeline too, and none of them is left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from living_processes import living_below
from megatron_layouts import on
from run_helpers import wait_for

from spurline.errors import RankFailedError
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_rl.testing.backend_cases import minibatch
from spurline_rl.testing.backend_runs import backend_run, opened

pytestmark = pytest.mark.processes

PIPELINE = {"ranks": 2, "pipeline": 2}


@contextmanager
def after_two_updates(
    model: Path, monkeypatch: pytest.MonkeyPatch, rank: int, how: str, **settings: int | float
) -> Iterator[tuple[Backend, ParallelLayout, list[psutil.Process]]]:
    """A backend whose next update fails, and its ranks; none of these is left in the end."""
    monkeypatch.setenv("FAILING_RANK", f"{rank}:{how}")
    monkeypatch.setattr(MegatronBackendConfig, "worker", "megatron_ranks:fails")
    # The check at start-up runs the model too, and the failing rank counts such runs.
    run = backend_run(model, on(**{"ranks": 2, "probe": False, **settings}), ("megatron_backend",))
    with opened(run) as (backend, layout):
        ranks = living_below(os.getpid(), "spurline_ranks.rank_main")
        assert len(ranks) == settings.get("ranks", 2)
        for step in range(2):
            backend.update(*minibatch("packed", layout, step))
        yield backend, layout, ranks
        wait_for(lambda: not any(process.is_running() for process in ranks), "the end of all ranks", 25)


@pytest.mark.parametrize(
    ("layout", "rank", "how", "said"),
    [
        # The second stage waits for hidden states, the first for their gradients.
        (PIPELINE, 0, "value", r"failed during `update`: ValueError: broken on purpose"),
        (PIPELINE, 1, "kill", r"was killed by SIGKILL, .*, during `update`"),
        pytest.param(PIPELINE, 1, "value", "ValueError: broken on purpose", marks=pytest.mark.slow),
        pytest.param(PIPELINE, 0, "kill", "was killed by SIGKILL", marks=pytest.mark.slow),
        ({"tensor": 2}, 1, "value", "ValueError: broken on purpose"),
        pytest.param({"ranks": 4, "tensor": 2, "pipeline": 2}, 1, "kill", "killed by SIGKILL", marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "tensor": 2, "pipeline": 2}, 2, "value", "ValueError", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_is_named_at_once_while_the_others_wait_for_it(
    spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], rank: int, how: str, said: str
) -> None:
    failing = after_two_updates(spurline_tiny_model, monkeypatch, rank, how, **layout)
    with failing as (backend, parallel, _):
        with pytest.raises(RankFailedError, match=rf"Rank {rank} of .*{said}") as raised:
            backend.update(*minibatch("packed", parallel, 2))
        assert raised.value.rank == rank


def test_a_stage_that_stands_still_is_named_with_its_stack_and_that_of_the_stage_that_waits(
    spurline_tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = after_two_updates(spurline_tiny_model, monkeypatch, 0, "sleep", **PIPELINE, call_timeout_s=10)
    with failing as (backend, parallel, _):
        with pytest.raises(RankFailedError, match=r"was not done within 10 s.* backend.call_timeout_s") as raised:
            backend.update(*minibatch("packed", parallel, 2))
        first, _, second = str(raised.value).partition("Stack of rank 1:")
        assert "in _stands_still" in first.partition("Stack of rank 0:")[2]
        assert "recv_forward" in second
