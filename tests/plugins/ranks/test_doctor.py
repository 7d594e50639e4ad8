"""`spurline doctor` with real ranks and no model: where they are, what they share, and how fast they exchange."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spurline.config.loading import load_config
from spurline.errors import RankFailedError
from spurline_megatron_backend.doctor import groups_of
from spurline_megatron_backend.grid import Grid
from spurline_models.machine import Finding
from spurline_ranks import doctor


def found(tmp_path: Path, name: str = "fsdp", **backend: Any) -> dict[str, Finding]:
    """Findings for a run whose model is not there: doctor starts ranks without one."""
    plain = {
        "plugins": [f"{name}_backend"],
        "run_dir": str(tmp_path / "run"),
        "model": {"path": "nowhere"},
        "data": {"train": "rows.jsonl"},
        "steps": 1,
        "backend": {"name": name, "device": "cpu", "ranks": 2, "num_threads": 1, **backend},
    }
    run = load_config(plain).config
    return {finding.what: finding for finding in run.backend.doctor(run)}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "layout", "groups"),
    [
        pytest.param(
            "fsdp",
            {"context": 2, "replicas": 2},
            ["hold one copy of the model", "hold the same part of each copy", "share sequences"],
            id="copies and context",
        ),
        pytest.param("fsdp", {"expert": 2}, ["divide the experts", "hold parts of the same experts"], id="experts"),
        pytest.param(
            "megatron", {"tensor": 2, "pipeline": 2}, ["divide layers"], id="megatron", marks=pytest.mark.slow
        ),
    ],
)
def test_ranks_meet_in_every_group_of_the_layout_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, layout: dict[str, int], groups: list[str]
) -> None:
    monkeypatch.setattr(doctor, "EXCHANGED_BYTES", 2**20)
    findings = found(tmp_path, name, ranks=4, **layout)
    assert [finding for finding in findings.values() if finding.fix] == []
    assert findings["ranks"].value.startswith("4 met each other in ")
    assert "ranks 0 to 3" in findings["ranks"].value
    for group in ("all ranks", *(f"ranks that {what}" for what in groups)):
        assert findings[f"all-reduce of 64 MB, {group}"].value.endswith("GB/s from each rank")
    assert ("megatron-core 0.16" in findings["versions of the ranks"].value) == (name == "megatron")
    assert not (tmp_path / "run").exists()


@pytest.mark.processes
def test_ranks_that_cannot_start_are_a_finding_with_what_to_do(tmp_path: Path) -> None:
    [finding] = found(tmp_path, device="cuda", ranks=64).values()
    assert finding.value == "64 were requested, but did not start"
    assert finding.fix.startswith("backend.ranks asks for 64 ranks with a GPU each")


@pytest.mark.processes
def test_ranks_that_end_meanwhile_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = doctor.open_ranks

    def open_and_call_wrongly(*arguments: Any) -> Any:
        ranks = opened(*arguments)
        with pytest.raises(RankFailedError):
            ranks.call("no_such_method")
        return ranks

    monkeypatch.setattr(doctor, "open_ranks", open_and_call_wrongly)
    [finding] = found(tmp_path).values()
    assert finding.value == "ended before they answered"
    assert "no_such_method" in finding.fix


def test_devices_that_are_taken_are_named_with_their_machine() -> None:
    one = {"node": "a", "device": "H100", "memory": (70 * 2**30, 80 * 2**30), "threads": 1}
    fine, taken = doctor._devices([one, {**one, "node": "b", "memory": (2**30, 80 * 2**30)}])
    assert (fine.value, fine.fix) == ("H100, 70.0 of 80.0 GiB free", "")
    assert taken.fix == "end other programs on the GPU of b: see `nvidia-smi`"


def test_wrong_values_of_an_exchange_are_worse_than_slow_ones() -> None:
    slow = doctor._exchanged("all ranks", [(0.5, 1e9), (1.0, 1e9)])
    assert (slow.value, slow.fix) == ("1,000.0 ms, 1.00 GB/s from each rank", "")
    wrong = doctor._exchanged("all ranks", [(0.5, 1e9), None])
    assert wrong.value == "wrong values in rank 1"
    assert wrong.fix


def test_a_machine_without_megatron_core_is_told_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("configs", "doctor"):
        monkeypatch.setattr(f"spurline_megatron_backend.{module}.has_megatron_core", lambda: False)
    [finding] = found(tmp_path, "megatron").values()
    assert finding.fix == "Run `pip install 'megatron-core>=0.16.1,<0.17'`."


SIZE = st.sampled_from([1, 2])


@given(tensor=SIZE, pipeline=SIZE, context=SIZE, data=SIZE, expert=SIZE, expert_tensor=SIZE)
def test_groups_of_megatron_have_every_rank_once_and_are_as_large_as_their_setting(
    tensor: int, pipeline: int, context: int, data: int, expert: int, expert_tensor: int
) -> None:
    ranks = tensor * pipeline * context * data * expert * expert_tensor
    grid = Grid(ranks, tensor, pipeline, 1, context, expert, expert_tensor)
    groups = groups_of(grid)
    for members in groups.values():
        assert sorted(rank for group in members for rank in group) == list(range(ranks))
        assert len({len(group) for group in members}) == 1
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
    sizes = {name: len(members[0]) for name, members in groups.items()}
    assert sizes == {name: size for name, size in expected.items() if size > 1}
