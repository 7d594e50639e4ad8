"""Several runs on one page."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import shown_panels
from compared_runs import write_run
from typer.testing import CliRunner

from spurline.cli import app
from spurline.errors import RunDirectoryError, UserError
from spurline_insight.report.comparison import write_comparison
from spurline_insight.report.markup import score
from spurline_insight.report.record import distinct_names


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "slow", 12, lr=1e-4), write_run(tmp_path / "fast", 20, lr=1e-3)]


def figures(page: Path) -> dict[str, dict[str, Any]]:
    """By the titles of their y axes."""
    drawn = shown_panels.figures(page.read_text(encoding="utf-8"))
    return {figure["layout"]["yaxis"]["title"]["text"]: figure for figure in drawn}


def words(page: Path) -> str:
    """What a reader sees beside the plots."""
    html = page.read_text(encoding="utf-8")
    html = re.sub(r"<(script|style).*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def test_curves_of_the_runs_lie_over_each_other_in_a_colour_for_each(runs: list[Path], tmp_path: Path) -> None:
    drawn = figures(write_comparison(runs, tmp_path / "comparison.html"))
    assert {"loss", "grad_norm", "time/batch", "eval/loss", "eval/hard/exact_match"} <= drawn.keys()
    colors = {
        name: {trace["name"]: trace["line"]["color"] for trace in figure["data"]} for name, figure in drawn.items()
    }
    assert all(found == {"slow": "--series-1", "fast": "--series-2"} for found in colors.values()), colors
    assert drawn["loss"]["layout"]["xaxis"]["title"]["text"] == "Step"
    assert max(max(trace["x"]) for trace in drawn["loss"]["data"]) == 20


def test_settings_that_differ_stand_side_by_side_and_no_others(runs: list[Path], tmp_path: Path) -> None:
    found = words(write_comparison(runs, tmp_path / "comparison.html"))
    assert "Settings that differ Setting slow fast optimizer.lr 0.0001 0.001" in found
    assert "optimizer.name" not in found
    assert "run_dir" not in found


def test_a_parent_and_its_fork_show_the_settings_first_and_the_steps_after_the_fork(tmp_path: Path) -> None:
    parent, fork = write_run(tmp_path / "parent"), write_run(tmp_path / "fork", lr=1e-3)
    summary = json.loads((fork / "summary.json").read_text())
    made = {"step": 7, "key": "run_dir", "before": str(parent.resolve()), "now": str(fork)}
    (fork / "summary.json").write_text(json.dumps(summary | {"history": [made]}))
    page = write_comparison([parent, fork], tmp_path / "comparison.html")
    found = words(page)
    assert found.index("These runs are one run up to step 7.") < found.index("optimizer.lr") < found.index("Results")
    assert [trace["x"][0] for trace in figures(page)["grad_norm"]["data"]] == [8, 8]
    unrelated = write_run(tmp_path / "unrelated", lr=1e-2)
    assert "one run up to" not in words(write_comparison([parent, fork, unrelated], tmp_path / "three.html"))


def test_results_stand_side_by_side_with_the_extremes_of_each_run(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(runs, tmp_path / "comparison.html")
    row = re.search(r"<tr><td>eval/hard/exact_match</td>(.*?)</tr>", page.read_text())
    assert row is not None
    of_slow, of_fast = row[1].split("</td>")[:2]
    assert "· 0.9231 at step 12" in of_slow
    assert "· 0.9524 at step 20" in of_fast


def test_20_long_runs_with_many_metrics_fit_on_a_page_and_more_are_an_error(tmp_path: Path) -> None:
    noise = random.Random(7)
    folders = [tmp_path / f"a-sweep-over-settings-{number}" for number in range(21)]
    names = ["loss", "reward/mean", "eval/loss", *(f"group{number % 6}/metric{number}" for number in range(30))]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"seed": noise.random()}))
        lines = [{"step": step} | {name: noise.random() for name in names} for step in range(1, 401)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_comparison(folders[:20], tmp_path / "comparison.html")
    drawn = figures(page)
    assert len(drawn) == len(names)
    assert {len({trace["name"] for trace in figure["data"]}) for figure in drawn.values()} == {20}
    assert page.stat().st_size < 5_000_000
    with pytest.raises(UserError, match="at most 20"):
        write_comparison(folders, tmp_path / "more.html")


def test_text_of_runs_is_escaped(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script>"
    folders = [write_run(tmp_path / name, 2, more={attack: 1.0}) for name in ("<b>x", "y")]
    (folders[0] / "config.json").write_text(json.dumps({attack: attack}))
    html = write_comparison(folders, tmp_path / "comparison.html").read_text()
    assert "<script>alert" not in html
    assert "<b>x" not in html


def test_runs_of_the_same_name_are_told_apart_by_the_folders_above(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    assert distinct_names(paths) == ["a/run", "b/run", "other"]
    found = words(write_comparison([write_run(path) for path in paths], tmp_path / "comparison.html"))
    assert "3 runs compared a/run Finished" in found


def test_what_cannot_be_compared_is_said(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "comparison.html"
    with pytest.raises(UserError, match="given twice"):
        write_comparison([runs[0], tmp_path / "." / "slow"], out)
    with pytest.raises(RunDirectoryError, match="no such folder"):
        write_comparison([runs[0], tmp_path / "missing"], out)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunDirectoryError, match="not a run directory"):
        write_comparison([runs[0], tmp_path / "empty"], out)
    (runs[1] / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    with pytest.raises(UserError, match=r"no metric in common.*slow: .*fast: reward/mean"):
        write_comparison(runs, out)
    assert not out.exists()


def test_the_command_compares_several_runs_and_reports_one(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["report", *map(str, runs)])
    assert (done.exit_code, done.output.strip()) == (0, "comparison.html")
    done = CliRunner().invoke(app, ["report", *map(str, runs), "--out", "both.html"])
    assert (done.exit_code, (tmp_path / "both.html").exists()) == (0, True)
    done = CliRunner().invoke(app, ["report", str(runs[0]), "--out", "one.html"])
    assert isinstance(done.exception, UserError)


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (1.5, "1.500"), (0.33604, "0.3360"), (1234.0, "1234"), (2e-7, "2.000e-07")]
)
def test_losses_have_four_digits(value: float, shown: str) -> None:
    assert score(value) == shown
