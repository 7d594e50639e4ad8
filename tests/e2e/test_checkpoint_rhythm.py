"""When a run saves, which checkpoints it keeps, and how it starts again without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from run_helpers import Config, Spurline, fail_at, kept_steps, read_metrics, train
from safetensors.torch import load_file

from spurline.run.checkpoints import saving
from spurline_insight.report.record import read_record

GiveScores = Callable[..., None]


@pytest.fixture
def scored_config(base_config: Config, spurline_chat_file: Path) -> Config:
    """Six steps with an evaluation after each. The last and the best checkpoint are kept."""
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {"every_steps": 1}
    base_config["checkpoint"] = {"every_minutes": None, "keep_last": 1, "keep_best": "eval/score"}
    return base_config


def test_a_run_saves_every_quarter_of_an_hour_by_default(base_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    del base_config["checkpoint"]
    ticks = iter(range(0, 10**9, 6 * 60))
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    saved: list[int] = []
    train(base_config, steps=7, on_checkpoint_saved=lambda step: saved.append(step))
    # Each look at the clock is six minutes after the last one.
    assert saved == [3, 6, 7]


def test_minutes_save_too_and_without_any_rhythm_a_run_saves_only_at_its_end(base_config: Config) -> None:
    fail_at(base_config | {"checkpoint": {"every_minutes": None}}, 6)
    assert kept_steps(base_config["run_dir"]) == []
    base_config["checkpoint"] = {"every_minutes": 1e-9}
    fail_at(base_config, 4)
    assert kept_steps(base_config["run_dir"]) == [2, 3]
    assert train(base_config).steps == [1, 2, 3, 4, 5, 6]


def test_a_run_without_checkpoint_starts_again_and_keeps_what_the_first_attempt_left(
    spurline: Spurline, base_config: Config, spurline_chat_file: Path
) -> None:
    base_config["checkpoint"] = {"every_minutes": None}
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {
        "every_steps": 2,
        "generate": {"rewards": {"exact": "exact_match"}, "max_new_tokens": 2, "max_samples": 2},
    }
    run_dir = Path(base_config["run_dir"])
    attempts = []
    for attempt in (1, 2):
        fail_at(base_config, 2 + attempt)
        attempts.append((run_dir / "metrics.jsonl").read_bytes())
    code, out, _ = spurline("train", base_config)
    assert code == 0
    assert f"{run_dir} has 3 steps of an earlier attempt and no checkpoint, so the run starts again." in out
    assert str(run_dir / "before-2") in out
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2, 3, 4, 5, 6]
    for number, attempt in enumerate(attempts, start=1):
        record = run_dir / f"before-{number}"
        assert (record / "metrics.jsonl").read_bytes() == attempt
        assert len((record / "eval_samples.jsonl").read_text().splitlines()) == 2
        assert read_record(record).summary["status"] == "failed"
    assert len((run_dir / "eval_samples.jsonl").read_text().splitlines()) == 6
    code, out, _ = spurline("train", base_config)
    assert "earlier attempt" not in out


@pytest.mark.parametrize(
    ("scores", "setting", "best"),
    [
        ([1, 5, 2, 3, 4, 0], "eval/score", 2),
        ([1, 5, 2, 3, 4, 5], "eval/score", 2),
        ([3, 5, 2, 3, 4, 2], {"metric": "eval/score", "mode": "min"}, 3),
        ([1, 2, 3, 4, 5, 6], "eval/score", 6),
        # Less is better for losses and errors.
        ([1, 2, 3, 4, 5, 6], "eval/loss", 1),
        ([1, 2, 3, 4, 5, 6], "eval/sum_error", 1),
    ],
)
def test_the_best_checkpoint_is_kept_besides_the_last(
    scored_config: Config, give_scores: GiveScores, scores: list[float], setting: Any, best: int
) -> None:
    scored_config["checkpoint"]["keep_best"] = setting
    name = setting if isinstance(setting, str) else "eval/score"
    give_scores(*scores, name=name.removeprefix("eval/"))
    run = train(scored_config)
    assert kept_steps(run) == sorted({best, 6})
    folder = run.run_dir / "checkpoints"
    assert (folder / "best").read_text() == f"step-{best:08d}\n"
    assert (folder / "latest").read_text() == "step-00000006\n"
    assert run.checkpoint == folder / "step-00000006"


def test_the_best_score_is_remembered_over_a_resume(scored_config: Config, give_scores: GiveScores) -> None:
    scored_config["checkpoint"]["every_steps"] = 1
    give_scores(1, 9, 2)
    fail_at(scored_config, 4)
    assert kept_steps(scored_config["run_dir"]) == [2, 3]
    # A kill between the checkpoint and the file that names it must not lose it.
    best = Path(scored_config["run_dir"]) / "checkpoints" / "best"
    best.unlink()
    give_scores(3, 4, 5)
    assert kept_steps(train(scored_config)) == [2, 6]
    assert best.read_text() == "step-00000002\n"


def test_another_measure_of_the_best_begins_again_and_says_so(
    scored_config: Config, give_scores: GiveScores, capsys: pytest.CaptureFixture[str]
) -> None:
    scored_config["checkpoint"]["every_steps"] = 1
    give_scores(1, 9, 2)
    fail_at(scored_config, 4)
    scored_config["checkpoint"]["keep_best"] = {"metric": "eval/score", "mode": "min"}
    give_scores(3, 4, 5)
    assert kept_steps(train(scored_config)) == [4, 6]
    assert "the best eval/score so far, 9 at step 2, no longer counts" in capsys.readouterr().out


def test_the_best_checkpoint_can_be_exported_by_name(
    spurline: Spurline, scored_config: Config, give_scores: GiveScores, tmp_path: Path
) -> None:
    give_scores(1, 9, 2, 3, 4, 5)
    run_dir = train(scored_config).run_dir
    for name, step in (("best", 2), ("latest", 6)):
        code, _, err = spurline("export", run_dir, tmp_path / name, "--checkpoint", name)
        assert (code, err) == (0, "")
        weights = load_file(run_dir / "checkpoints" / f"step-{step:08d}" / "backend/model.safetensors")
        exported = load_file(tmp_path / name / "model.safetensors")
        assert all((exported[key] == weights[key]).all() for key in exported)
    (run_dir / "checkpoints" / "best").unlink()
    code, _, err = spurline("export", run_dir, tmp_path / "again", "--checkpoint", "best")
    assert (code, "has no best checkpoint" in err) == (2, True)
