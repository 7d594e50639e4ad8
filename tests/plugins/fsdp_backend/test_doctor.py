"""`spurline doctor` with real ranks and no model: where they are, what they share, and how fast they exchange."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spurline.config.loading import load_config
from spurline.config.run_config import RunConfig
from spurline.errors import RankFailedError
from spurline_models.machine import Finding
from spurline_ranks import doctor

pytestmark = pytest.mark.processes


def run_on(tmp_path: Path, **backend: Any) -> RunConfig:
    """A run whose model is not there: doctor starts ranks without one."""
    settings = {"name": "fsdp", "device": "cpu", "ranks": 2, "num_threads": 1, **backend}
    return load_config(
        {
            "plugins": ["fsdp_backend"],
            "run_dir": str(tmp_path / "run"),
            "model": {"path": "nowhere"},
            "data": {"train": "rows.jsonl"},
            "steps": 1,
            "backend": settings,
        }
    ).config


def found(run: RunConfig) -> dict[str, Finding]:
    return {finding.what: finding for finding in run.backend.doctor(run)}


@pytest.mark.parametrize(
    ("layout", "groups"),
    [
        (
            {"context": 2, "replicas": 2},
            (
                "ranks that hold one copy of the model",
                "ranks that hold the same part of the copies",
                "ranks that share sequences",
            ),
        ),
        ({"expert": 2}, ("ranks that divide the experts", "ranks that hold parts of the same experts")),
    ],
    ids=["copies and context", "experts"],
)
def test_ranks_meet_in_every_group_of_the_layout_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], groups: tuple[str, ...]
) -> None:
    monkeypatch.setattr(doctor, "EXCHANGED_BYTES", 2**20)
    findings = found(run_on(tmp_path, ranks=4, **layout))
    assert [finding for finding in findings.values() if finding.fix] == []
    assert findings["ranks"].value.startswith("4 met each other in ")
    assert "ranks 0 to 3" in findings["ranks"].value
    for group in ("all ranks", *groups):
        assert findings[f"all-reduce of 64 MB, {group}"].value.endswith("GB/s from each rank")
    assert not (tmp_path / "run").exists()


def test_ranks_that_cannot_start_are_a_finding_with_what_to_do(tmp_path: Path) -> None:
    [finding] = found(run_on(tmp_path, device="cuda", ranks=64)).values()
    assert finding.value == "64 were asked for, and did not start"
    assert finding.fix.startswith("backend.ranks asks for 64 ranks with a GPU each")


def test_ranks_that_end_meanwhile_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = doctor.open_ranks

    def open_and_call_wrongly(*arguments: Any) -> Any:
        ranks = opened(*arguments)
        with pytest.raises(RankFailedError):
            ranks.call("no_such_method")
        return ranks

    monkeypatch.setattr(doctor, "open_ranks", open_and_call_wrongly)
    [finding] = found(run_on(tmp_path)).values()
    assert finding.value == "ended before they answered"
    assert "no_such_method" in finding.fix


def test_devices_that_are_taken_are_named_with_their_machine() -> None:
    one = {"node": "a", "device": "H100", "memory": (70 * 2**30, 80 * 2**30), "threads": 1}
    fine, taken = doctor._devices([one, {**one, "node": "b", "memory": (2**30, 80 * 2**30)}])
    assert (fine.value, fine.fix) == ("H100, 70.0 of 80.0 GiB free", "")
    assert taken.fix == "end what else runs on the GPU of b: see `nvidia-smi`"


def test_wrong_values_of_an_exchange_are_worse_than_slow_ones() -> None:
    right = doctor.Exchange(seconds=0.5, sent=1e9, right=True)
    slow = doctor._exchanged("all ranks", [right, replace(right, seconds=1.0)])
    assert (slow.value, slow.fix) == ("1,000.0 ms, 1.00 GB/s from each rank", "")
    wrong = doctor._exchanged("all ranks", [right, replace(right, right=False)])
    assert wrong.value == "wrong values in rank 1"
    assert wrong.fix
