"""Several runs on one page."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from compared_runs import write_run
from typer.testing import CliRunner

from spurline.cli import app
from spurline.errors import RunDirectoryError, UserError
from spurline_insight.report import comparison
from spurline_insight.report.comparison import write_comparison
from spurline_insight.report.document import unpacked
from spurline_insight.report.record import distinct_names


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "slow", 12, lr=1e-4), write_run(tmp_path / "fast", 20, lr=1e-3)]


def figures(page: Path) -> dict[str, dict[str, Any]]:
    """By the titles of their y axes."""
    (digits,) = re.findall(r'id="figures">(.*?)</script>', page.read_text(encoding="utf-8"))
    return {figure["layout"]["yaxis"]["title"]["text"]: figure for figure in json.loads(unpacked(digits))}


def words(page: Path) -> str:
    """What a reader sees beside the plots."""
    html = page.read_text(encoding="utf-8")
    if body := re.search(r'id="body">(.*?)</script>', html):
        html = unpacked(body[1])
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


@pytest.mark.parametrize(
    ("key", "values", "unlike"),
    [
        ("data", [{"max_length": 64}, {"max_length": 128}], ["eval/loss", "eval/hard/exact_match"]),
        ("data", [{"eval": [{"path": "a"}]}, {"eval": [{"path": "b"}]}], ["eval/loss"]),
        ("evaluations", [{"hard": {"max_samples": 4}}, {"hard": {"max_samples": 8}}], ["eval/hard/exact_match"]),
        ("evaluations", [{"hard": {"every_steps": 4}}, {"hard": {"every_steps": 8}}], []),
        ("evaluation", [{"generate": {"max_new_tokens": 4}}, {"generate": None}], []),
    ],
)
def test_no_run_is_the_best_where_evaluations_measured_otherwise(
    runs: list[Path], tmp_path: Path, key: str, values: list[Any], unlike: list[str]
) -> None:
    for folder, value in zip(runs, values, strict=True):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))
    page = write_comparison(runs, tmp_path / "comparison.html")
    table = rows_of(page)
    for name in ("eval/loss", "eval/hard/exact_match"):
        assert ("<strong>best" in table[name]) is (name not in unlike), name
    said = words(page)
    assert ("No best of all runs for" in said) is bool(unlike)
    assert all(name in said.partition("No best of all runs for")[2].partition(" differs.")[0] for name in unlike)


def rows_of(page: Path) -> dict[str, str]:
    """The HTML of each metric's row of results."""
    html = page.read_text(encoding="utf-8")
    if body := re.search(r'id="body">(.*?)</script>', html):
        html = unpacked(body[1])
    results = html.partition("Results")[2].partition("</table>")[0]
    return {row.partition("</td>")[0].rpartition(">")[2]: row for row in results.split("<tr>")}


def test_what_was_measured_before_the_first_step_is_drawn_and_in_the_table(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(runs, tmp_path / "comparison.html")
    assert [trace["x"][0] for trace in figures(page)["eval/loss"]["data"]] == [0, 0]
    assert figures(page)["loss"]["data"][0]["x"][0] == 1
    assert re.search(r"Evaluation: hard exact_match Step slow fast 0 0 0 4 ", re.sub("0\\.0+", "0", words(page)))


def test_settings_that_differ_stand_side_by_side_and_no_others(runs: list[Path], tmp_path: Path) -> None:
    found = words(write_comparison(runs, tmp_path / "comparison.html"))
    assert "Settings that differ Setting slow fast optimizer.lr 0.0001 0.001" in found
    assert "optimizer.name" not in found
    assert "run_dir" not in found


def test_results_stand_side_by_side_with_the_best_of_all_runs_in_bold(runs: list[Path], tmp_path: Path) -> None:
    page = write_comparison(runs, tmp_path / "comparison.html")
    row = re.search(r"<tr><td>eval/hard/exact_match</td>(.*?)</tr>", page.read_text())
    assert row is not None
    of_slow, of_fast = row[1].split("</td>")[:2]
    assert "best 0.923 at step 12" in of_slow.replace("0.9231", "0.923")
    assert "<strong>" not in of_slow
    assert "<strong>best 0.952" in of_fast.replace("0.9524", "0.952")


def test_a_comparison_of_long_runs_with_many_metrics_takes_less_than_2_mb(tmp_path: Path) -> None:
    noise = random.Random(3)
    folders = [write_run(tmp_path / name, 1) for name in ("a", "b", "c")]
    for folder in folders:
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, 1001):
                more = {f"group{number % 9}/metric{number}": noise.random() for number in range(80)}
                more |= {f"eval/set{number % 4}/score{number}": noise.random() for number in range(20)}
                line = {"step": step, "loss": noise.random(), "grad_norm": noise.random(), "time/step": 1}
                file.write(json.dumps(line | more) + "\n")
        config = {f"setting{number}": noise.random() for number in range(300)} | {"x": [{"path": "p" * 900}]}
        (folder / "config.json").write_text(json.dumps(config))
    page = write_comparison(folders, tmp_path / "comparison.html")
    assert len(figures(page)) > 90
    assert page.stat().st_size < 2_000_000


def test_many_runs_that_differ_in_everything_take_less_than_2_mb_and_say_what_is_left_out(tmp_path: Path) -> None:
    noise = random.Random(5)
    folders = [write_run(tmp_path / f"a-run-with-a-long-name-{number}", 1) for number in range(10)]
    for folder in folders:
        config = {f"setting{number}": f"{noise.random()}" * 6 for number in range(200)}
        (folder / "config.json").write_text(json.dumps(config | {"evaluations": {f"set{i}": {} for i in range(30)}}))
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, 31):
                line = {f"group/metric{number}": noise.random() for number in range(100)} | {"loss": noise.random()}
                line |= {f"eval/set{number % 30}/score{number}": noise.random() for number in range(90)}
                file.write(json.dumps({"step": step} | line) + "\n")
    page = write_comparison(folders, tmp_path / "comparison.html")
    assert page.stat().st_size < 2_000_000
    assert re.search(r"Results .* more metrics: spurline view and metrics.jsonl have them", words(page))
    assert re.search(r"others differ too; config.json", words(page))


def test_300_runs_of_50_metrics_and_10_000_steps_take_less_than_2_mb_and_it_is_said_what_is_thinned(
    tmp_path: Path,
) -> None:
    noise = random.Random(7)
    folders = [tmp_path / f"a-sweep-over-settings-{number}" for number in range(300)]
    names = [
        "loss",
        "reward/mean",
        "grad_norm",
        "eval/loss",
        *(f"group{number % 6}/metric{number}" for number in range(46)),
    ]
    for folder in folders:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"seed": noise.random(), "lr": noise.random()}))
        # More points than a curve has then: of 10,000 no other page would be made.
        lines = [{"step": 769 * step} | {name: noise.random() for name in names} for step in range(1, 14)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = write_comparison(folders, tmp_path / "comparison.html")
    assert page.stat().st_size < 2_000_000
    found = words(page)
    assert found.count("a-sweep-over-settings-299") >= 3
    said = re.search(r"Curves that stand open have at most (\d+) of 13 points", found)
    assert said is not None
    drawn = figures(page)
    assert max(len(trace["x"]) for trace in drawn["loss"]["data"]) == int(said[1])
    left_out = re.search(r"not drawn (\d+) more metrics", found)
    assert left_out is not None
    assert len(drawn) == 50 - int(left_out[1]) >= 2


def test_more_runs_than_a_page_can_name_are_an_error(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "_MOST_BYTES", 1_000_000)
    with pytest.raises(UserError, match="2 runs do not fit on a page of 2 MB"):
        write_comparison(runs, tmp_path / "comparison.html")
    assert not (tmp_path / "comparison.html").exists()


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
