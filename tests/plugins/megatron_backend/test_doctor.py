"""`spurline doctor` with real ranks and no model: every group of the grid exchanges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.config.loading import load_config
from spurline_megatron_backend.doctor import groups_of
from spurline_megatron_backend.grid import Grid
from spurline_models.machine import Finding
from spurline_ranks import doctor


def found(tmp_path: Path, **backend: Any) -> dict[str, Finding]:
    """Findings for a run whose model is not there: doctor starts ranks without one."""
    plain = {
        "plugins": ["megatron_backend"],
        "run_dir": str(tmp_path / "run"),
        "model": {"path": "nowhere"},
        "data": {"train": "rows.jsonl"},
        "steps": 1,
        "backend": {"name": "megatron", "device": "cpu", "num_threads": 1, **backend},
    }
    run = load_config(plain).config
    return {finding.what: finding for finding in run.backend.doctor(run)}


def test_a_machine_without_megatron_core_is_told_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spurline_megatron_backend.doctor.has_megatron_core", lambda: False)
    assert list(found(tmp_path, ranks=2).values()) == [
        Finding("layers", "megatron-core is not installed here", "Run `pip install 'megatron-core>=0.16.1,<0.17'`.")
    ]


@pytest.mark.processes
@pytest.mark.slow
def test_ranks_meet_in_every_group_of_the_grid_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "EXCHANGED_BYTES", 2**20)
    findings = found(tmp_path, ranks=4, tensor=2, pipeline=2)
    assert [finding for finding in findings.values() if finding.fix] == []
    assert findings["ranks"].value.startswith("4 met each other in ")
    assert "megatron-core 0.16" in findings["versions of the ranks"].value
    assert findings["layers"].value.startswith("of megatron-core 0.16")
    for group in ("all ranks", "ranks that divide layers", "stages of the pipeline"):
        assert findings[f"all-reduce of 64 MB, {group}"].value.endswith("GB/s from each rank")
    assert not (tmp_path / "run").exists()


SIZE = st.sampled_from([1, 2])


@given(tensor=SIZE, pipeline=SIZE, context=SIZE, data=SIZE, expert=SIZE, expert_tensor=SIZE)
def test_groups_of_a_kind_have_every_rank_once_and_are_as_large_as_their_setting(
    tensor: int, pipeline: int, context: int, data: int, expert: int, expert_tensor: int
) -> None:
    ranks = tensor * pipeline * context * data * expert * expert_tensor
    grid = Grid(ranks, tensor, pipeline, 1, context, expert, expert_tensor)
    groups = groups_of(grid)
    for members in groups.values():
        assert sorted(rank for group in members for rank in group) == list(range(ranks))
        assert len({len(group) for group in members}) == 1
    sizes = {name: len(members[0]) for name, members in groups.items()}
    expected = {
        "ranks that divide layers": tensor,
        "ranks that share sequences": context,
        "ranks that hold the same weights": grid.data * context,
        "stages of the pipeline": pipeline,
    }
    if expert > 1 or expert_tensor > 1:
        expected |= {
            "ranks that divide the experts": expert,
            "ranks that divide each expert": expert_tensor,
            "ranks that hold the same experts": grid.expert_data,
        }
    assert sizes == {name: size for name, size in expected.items() if size > 1}
