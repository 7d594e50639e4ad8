"""When a run saves, which checkpoints it keeps, and what becomes of an attempt that saved none."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_helpers import fail_at, read_metrics

from spurline import Run, load_config
from spurline.errors import ConfigError
from spurline.plugins.hookspecs import hookimpl
from spurline.run.checkpoints import saving
from spurline.run.evaluations.evaluation import DataEvaluation
from spurline_insight.report.record import read_record

Spurline = Callable[..., tuple[int, str, str]]
WriteConfig = Callable[[dict[str, Any]], Path]


def kept(config: dict[str, Any]) -> list[int]:
    folder = Path(config["run_dir"]) / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@pytest.fixture
def scored_config(base_config: dict[str, Any], spurline_chat_file: Path) -> dict[str, Any]:
    """Six steps with an evaluation after each; of the checkpoints the last and the best are kept."""
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {"every_steps": 1}
    base_config["checkpoint"] = {"every_minutes": None, "keep_last": 1, "keep_best": "eval/score"}
    return base_config


def give_scores(monkeypatch: pytest.MonkeyPatch, scores: list[float], name: str = "eval/score") -> None:
    left = iter(scores)
    monkeypatch.setattr(DataEvaluation, "metrics", lambda _: None)
    monkeypatch.setattr(
        DataEvaluation,
        "evaluate",
        lambda self, backend: ({"loss": 1.0, name.removeprefix("eval/"): next(left)}, []),
    )


def test_a_run_saves_every_quarter_of_an_hour_by_default(
    base_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    del base_config["checkpoint"]
    base_config["steps"] = 7
    ticks = iter(range(0, 10**9, 6 * 60))
    monkeypatch.setattr(saving, "time", FakeTime(lambda: float(next(ticks))))
    saved: list[int] = []
    loaded = load_config(base_config)
    loaded.host.attach(NoteSaves(saved), "note")
    Run(loaded).train()
    # Each look at the clock is six minutes after the last one.
    assert saved == [3, 6, 7]


def test_a_run_that_dies_without_steps_between_checkpoints_goes_on_from_the_last_minutes(
    base_config: dict[str, Any],
) -> None:
    base_config["checkpoint"] = {"every_minutes": 1e-9}
    fail_at(base_config, 4)
    assert kept(base_config) == [2, 3]
    Run(load_config(base_config)).train()
    assert [line["step"] for line in read_metrics(base_config["run_dir"])] == [1, 2, 3, 4, 5, 6]


def test_no_minutes_save_only_at_the_end(base_config: dict[str, Any]) -> None:
    base_config["checkpoint"] = {"every_minutes": None}
    fail_at(base_config, 6)
    assert kept(base_config) == []


def test_a_run_without_checkpoint_starts_again_and_keeps_what_the_first_attempt_left(
    spurline: Spurline, write_config: WriteConfig, base_config: dict[str, Any], spurline_chat_file: Path
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
    code, out, _ = spurline("train", write_config(base_config))
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
    code, out, _ = spurline("train", write_config(base_config))
    assert "earlier attempt" not in out


@pytest.mark.parametrize(
    ("scores", "setting", "best"),
    [
        ([1, 5, 2, 3, 4, 0], "eval/score", 2),
        ([1, 5, 2, 3, 4, 5], "eval/score", 2),
        ([3, 5, 2, 3, 4, 2], {"metric": "eval/score", "mode": "min"}, 3),
        ([1, 2, 3, 4, 5, 6], "eval/score", 6),
    ],
)
def test_the_best_checkpoint_is_kept_besides_the_last(
    scored_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, scores: list[float], setting: Any, best: int
) -> None:
    scored_config["checkpoint"]["keep_best"] = setting
    give_scores(monkeypatch, scores)
    result = Run(load_config(scored_config)).train()
    assert kept(scored_config) == sorted({best, 6})
    folder = Path(scored_config["run_dir"]) / "checkpoints"
    assert (folder / "best").read_text() == f"step-{best:08d}\n"
    assert (folder / "latest").read_text() == "step-00000006\n"
    assert result.checkpoint == folder / "step-00000006"


@pytest.mark.parametrize(("metric", "best"), [("eval/loss", 1), ("eval/sum_error", 1), ("eval/exact", 6)])
def test_less_is_better_for_losses_and_errors(
    scored_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, metric: str, best: int
) -> None:
    scored_config["checkpoint"]["keep_best"] = metric
    give_scores(monkeypatch, [1, 2, 3, 4, 5, 6], metric)
    Run(load_config(scored_config)).train()
    assert kept(scored_config) == sorted({best, 6})


def test_the_best_score_is_remembered_over_a_resume(
    scored_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored_config["checkpoint"]["every_steps"] = 1
    give_scores(monkeypatch, [1, 9, 2])
    fail_at(scored_config, 4)
    assert kept(scored_config) == [2, 3]
    # A kill between the checkpoint and the file that names it must not lose it.
    (Path(scored_config["run_dir"]) / "checkpoints" / "best").unlink()
    give_scores(monkeypatch, [3, 4, 5])
    Run(load_config(scored_config)).train()
    assert kept(scored_config) == [2, 6]
    assert (Path(scored_config["run_dir"]) / "checkpoints" / "best").read_text() == "step-00000002\n"


def test_another_measure_of_the_best_begins_anew_and_says_so(
    scored_config: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scored_config["checkpoint"]["every_steps"] = 1
    give_scores(monkeypatch, [1, 9, 2])
    fail_at(scored_config, 4)
    scored_config["checkpoint"]["keep_best"] = {"metric": "eval/score", "mode": "min"}
    give_scores(monkeypatch, [3, 4, 5])
    Run(load_config(scored_config)).train()
    assert kept(scored_config) == [4, 6]
    assert "the best eval/score so far, 9 at step 2, no longer counts" in capsys.readouterr().out


def test_a_metric_that_no_evaluation_measures_is_named_and_costs_no_training(
    scored_config: dict[str, Any],
) -> None:
    scored_config["evaluation"]["every_steps"] = 2
    scored_config["checkpoint"]["keep_best"] = "eval/los"
    with pytest.raises(ConfigError, match=r"is eval/los, .* Did you mean 'eval/loss'\? Metrics: eval/loss, eval/time"):
        Run(load_config(scored_config)).train()
    scored_config["checkpoint"]["keep_best"] = "eval/loss"
    Run(load_config(scored_config)).train()
    assert [line["step"] for line in read_metrics(scored_config["run_dir"])] == [1, 2, 3, 4, 5, 6]
    assert kept(scored_config) == [6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"eval": None}, "evaluation": {}}, r"nothing is evaluated: `data.eval` is empty"),
        ({"evaluation": {}}, r"evaluates only once, at its end. Set evaluation.every_steps"),
        ({"checkpoint": {"keep_best": "loss"}}, r"keep_best.metric is loss, which is no metric of the held-out"),
    ],
)
def test_a_best_that_cannot_be_known_is_found_by_the_plan(
    spurline: Spurline, write_config: WriteConfig, scored_config: dict[str, Any], changes: Any, message: str
) -> None:
    for section, settings in changes.items():
        scored_config[section] = {**scored_config[section], **settings} if settings else {}
    code, _, err = spurline("plan", write_config(scored_config))
    assert code == 2
    assert re.search(message, err)


def test_the_best_checkpoint_can_be_exported_by_name(
    spurline: Spurline,
    write_config: WriteConfig,
    scored_config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file

    give_scores(monkeypatch, [1, 9, 2, 3, 4, 5])
    Run(load_config(scored_config)).train()
    run_dir = Path(scored_config["run_dir"])
    for name, step in (("best", 2), ("latest", 6)):
        code, _, err = spurline("export", run_dir, tmp_path / name, "--checkpoint", name)
        assert (code, err) == (0, "")
        weights = load_file(run_dir / "checkpoints" / f"step-{step:08d}" / "backend/model.safetensors")
        exported = load_file(tmp_path / name / "model.safetensors")
        assert all((exported[key] == weights[key]).all() for key in exported)
    (run_dir / "checkpoints" / "best").unlink()
    code, _, err = spurline("export", run_dir, tmp_path / "again", "--checkpoint", "best")
    assert code == 2
    assert "has no best checkpoint" in err


class NoteSaves:
    def __init__(self, saved: list[int]) -> None:
        self._saved = saved

    @hookimpl
    def on_checkpoint_saved(self, step: int) -> None:
        self._saved.append(step)


class FakeTime:
    """The module `time` with another monotonic clock."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self.monotonic = monotonic
