"""The report's panels on asynchronous rollouts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from shown_panels import figures
from timelines import leave_timeline

from spurline.plugins.host import PluginHost
from spurline_async_rl.timeline import panels
from spurline_async_rl.timeline.panels import TimelinePanel, lanes_of, last_window
from spurline_async_rl.timeline.records import GroupSpan, Span, StepRecord, Taken, encode_record, read_timeline
from spurline_insight.report_panel import ReportPanelConfig, RunRecord
from spurline_insight.testing import ReportPanelContract


class TestTimelinePanel(ReportPanelContract):
    def make_panel(self) -> TimelinePanel:
        return panel()


def panel() -> TimelinePanel:
    return TimelinePanel(ReportPanelConfig(name="rollout_timeline"))


def by_name(figure: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for trace in figure["data"]}


def drawn(run_dir: Path) -> list[dict[str, Any]]:
    return figures(panel().render(RunRecord(run_dir, [], {})) or "")


def write(run_dir: Path, *records: StepRecord) -> None:
    (run_dir / "timeline.jsonl").write_bytes(b"".join(encode_record(record) for record in records))


def group(draw: int, began: float, ended: float, version: int = 0, **changes: Any) -> GroupSpan:
    return GroupSpan(
        **{
            "draw": draw,
            "began": began,
            "ended": ended,
            "version": version,
            "state": "buffered",
            "tokens": 5,
            "oldest": version,
            "newest": version,
        }
        | changes
    )


def test_the_panel_is_on_every_report_while_the_plugin_is_enabled() -> None:
    entries = PluginHost.load(["async_rl"]).registry.entries("async_rl")
    assert {entry.name for entry in entries if entry.kind == "report_panel"} == {"rollout_timeline"}


def test_groups_are_coloured_by_the_age_of_their_oldest_token_when_they_were_trained(tmp_path: Path) -> None:
    write(
        tmp_path,
        StepRecord(
            1,
            2.0,
            (group(0, 0.0, 1.0), group(1, 0.0, 1.5, state="filtered"), group(4, 1.5, 2.0, state="given back")),
            (),
            (Taken(1, 1.0, (0,)),),
        ),
        StepRecord(2, 4.0, (group(2, 1.0, 3.0, newest=1), group(3, 3.0, 3.5, 1)), (), (Taken(2, 3.0, (2,)),)),
    )
    (figure,) = drawn(tmp_path)
    bars = by_name(figure)
    assert bars.keys() == {"staleness 0", "staleness 1", "not trained yet", "filtered", "generated again"}
    assert (bars["staleness 0"]["base"], bars["staleness 0"]["x"]) == ([0.0], [1.0])
    assert (bars["staleness 1"]["base"], bars["staleness 1"]["x"], bars["staleness 1"]["y"]) == ([1.0], [2.0], [1])
    assert "tokens of version 0 to 1; trained at step 2" in bars["staleness 1"]["hovertext"][0]


def test_a_window_counts_seconds_from_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "_MAX_STEPS", 1)
    late = 400_000.0
    write(
        tmp_path,
        StepRecord(1, late, (), (Span("train", late - 1, late),)),
        StepRecord(2, late + 2, (group(1, late + 0.125, late + 1.375),), (Span("wait", late, late + 0.5),)),
    )
    (figure,) = drawn(tmp_path)
    bars = by_name(figure)
    assert bars["not trained yet"]["base"] == [0.125]
    assert bars["waiting for a batch"]["x"] == [0.5]
    assert "training" not in bars
    assert figure["layout"]["xaxis"]["range"] == [0.0, 2.0]


def test_a_window_of_many_groups_has_fewer_steps(tmp_path: Path) -> None:
    groups = tuple(group(draw, 0.0, 1.0) for draw in range(700))
    records = [StepRecord(step, float(step), groups) for step in range(1, 9)]
    assert (last_window(records).first, last_window(records).last) == (7, 8)


def test_no_two_groups_share_a_lane_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "_MAX_STEPS", 100)
    leave_timeline(tmp_path / "timeline.jsonl", max_running=5)
    records = read_timeline(tmp_path / "timeline.jsonl")
    lanes = lanes_of(records, last_window(records))
    assert len(lanes) == sum(len(record.groups) for record in records)
    by_lane: dict[int, list[GroupSpan]] = {}
    for lane, group in lanes:
        by_lane.setdefault(lane, []).append(group)
    assert by_lane.keys() == set(range(5))
    for groups in by_lane.values():
        for before, after in pairwise(groups):
            assert before.ended <= after.began


def staleness(*metrics: dict[str, float], config: dict[str, Any] | None = None) -> str:
    lines = [{"step": step, **line} for step, line in enumerate(metrics, start=1)]
    return panel().render(RunRecord(Path("/nonexistent"), lines, config or {})) or ""


def test_tokens_are_counted_by_age_over_the_whole_run() -> None:
    fragment = staleness(
        {"staleness/tokens_0": 10, "staleness/tokens_1": 0},
        {"staleness/tokens_0": 10, "staleness/tokens_1": 20},
        config={"source": {"max_staleness": 2}},
    )
    (histogram,) = figures(fragment)
    assert histogram["data"][0]["x"] == [0, 1]
    assert histogram["data"][0]["y"] == [0.5, 0.5]
    assert histogram["data"][0]["customdata"] == [20.0, 20.0]
    assert "0.5 updates old on average, and 1 at most (max_staleness: 2)" in fragment


def test_numbers_of_groups_are_drawn_over_steps() -> None:
    fragment = staleness(
        {"staleness/tokens_0": 1, "async/buffered": 3},
        {"staleness/tokens_0": 1, "async/depth": 9.5},
        {"staleness/tokens_0": 1, "async/buffered": 4},
    )
    traces = {name: trace for figure in figures(fragment)[1:] for name, trace in by_name(figure).items()}
    assert traces["finished, untrained"]["y"] == [3, 4]
    assert traces["depth of admission"]["y"] == [9.5]
