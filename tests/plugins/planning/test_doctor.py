"""What `spurline doctor RUN.yaml` finds of machine, folders and model, before a run is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from spurline.cli import main
from spurline.config.loading import load_config
from spurline.protocols.ranks import RankRequest
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.machine import Finding
from spurline_planning import doctor


@pytest.fixture
def config(spurline_tiny_model: Path, spurline_chat_file: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "run_dir": str(tmp_path / "runs" / "deep" / "run"),
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(spurline_chat_file)},
        "steps": 2,
        "backend": {"name": "local", "device": "cpu"},
    }


def found(config: dict[str, Any]) -> dict[str, Finding]:
    return {finding.what: finding for finding in doctor.find(load_config(config))}


def test_a_sound_run_has_no_fix_and_leaves_no_trace(config: dict[str, Any], tmp_path: Path) -> None:
    findings = found(config)
    assert [finding.what for finding in findings.values() if finding.fix] == []
    assert "torch" in findings["versions"].value
    assert "can be written and locked" in findings["run_dir"].value
    assert findings["model"].value.endswith("parameters")
    assert not (tmp_path / "runs").exists()


def test_a_run_dir_that_cannot_be_made_is_named_with_a_way_out(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    finding = found(config | {"run_dir": str(tmp_path / "file" / "run")})["run_dir"]
    assert "Not a directory" in finding.value
    assert "--set run_dir=PATH" in finding.fix


def test_an_existing_run_dir_keeps_what_is_in_it(config: dict[str, Any]) -> None:
    run_dir = Path(config["run_dir"])
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("{}\n", encoding="utf-8")
    found(config)
    assert [entry.name for entry in run_dir.iterdir()] == ["metrics.jsonl"]


def test_a_model_that_cannot_be_read_is_a_finding_and_not_an_end(config: dict[str, Any], tmp_path: Path) -> None:
    findings = found(config | {"model": {"path": str(tmp_path)}})
    assert "no weights can be loaded" in findings["model"].fix
    assert "run_dir" in findings


def test_few_open_files_are_found(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (256, 1024))
    findings = found(config)
    assert findings["open files"] == Finding("open files", "256", "run `ulimit -n 1024` before the run")


@pytest.mark.parametrize("device", ["cuda", "cpu", None])
def test_little_shared_memory_is_found_where_ranks_exchange_on_gpus_alone(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, device: Literal["cuda", "cpu"] | None
) -> None:
    monkeypatch.setattr(doctor, "SHARED_MEMORY", 2**60)
    request = None if device is None else RankRequest(2, device)
    monkeypatch.setattr(LocalBackendConfig, "rank_request", lambda self: request)
    findings = found(config)
    assert ("/dev/shm" in findings) == (device == "cuda")
    if device == "cuda":
        assert "--shm-size" in findings["/dev/shm"].fix


def test_the_command_prints_findings_and_ends_with_2_on_a_problem(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(path)])
    assert ended.value.code == 0
    assert "ok       run_dir: " in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["doctor", str(path), "--json", "--set", f"model.path={tmp_path}"])
    assert ended.value.code == 2
    findings = json.loads(capsys.readouterr().out)
    assert [finding["what"] for finding in findings if finding["fix"]] == ["model"]
