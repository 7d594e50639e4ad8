"""Figures: thinning, smoothing and how they are put into the page."""

from __future__ import annotations

import html
import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spurline_insight.report.figure import (
    MAX_POINTS,
    figure,
    level,
    line,
    moving_means,
    raw_and_smoothed,
    step_figure,
    thinned,
)


def content_of(fragment: str) -> dict:
    match = re.fullmatch(
        r'<div class="plot"[^>]*></div><script type="application/json" class="figure">(.*)</script>', fragment
    )
    assert match is not None, fragment[:200]
    return json.loads(match.group(1))


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 20_000), st.integers(0, 2**32))
def test_thinning_keeps_ends_and_extremes_and_few_points(num_points: int, seed: int) -> None:
    values = [math.sin(seed + index) * (index % 97) for index in range(num_points)]
    steps = list(range(1, num_points + 1))
    kept_steps, kept_values = thinned(steps, values)
    assert len(kept_steps) == len(kept_values) == min(num_points, len(kept_steps)) <= MAX_POINTS
    assert kept_steps == sorted(set(kept_steps))
    assert all(values[step - 1] == value for step, value in zip(kept_steps, kept_values, strict=True))
    if values:
        assert (kept_steps[0], kept_steps[-1]) == (1, num_points)
        assert (min(kept_values), max(kept_values)) == (min(values), max(values))


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=35))
def test_moving_means_are_those_of_the_window_around_each_point(values: list[float]) -> None:
    windows = [values[max(0, index - 2) : index + 3] for index in range(len(values))]
    assert moving_means(values) == pytest.approx([sum(window) / len(window) for window in windows], abs=1e-6)


def test_the_smoothed_line_of_a_constant_is_that_constant() -> None:
    _, mean = raw_and_smoothed("loss", list(range(50)), [2.5] * 50, "--series-1")
    assert mean["y"] == pytest.approx([2.5] * 50)


def test_a_short_series_is_drawn_once_with_its_points_marked() -> None:
    (only,) = raw_and_smoothed("loss", [1], [2.0], "--series-1")
    assert only["mode"] == "lines+markers"


def test_text_inside_a_figure_cannot_end_its_script_element() -> None:
    name = "</script><script>alert(1)</script><!--"
    fragment = figure([line(name, [1], [1.0], "--series-1")], {}, label='a "label"')
    assert fragment.count("<script") == 1
    assert "<!--" not in fragment
    assert 'aria-label="a &quot;label&quot;"' in fragment
    assert html.unescape(content_of(fragment)["data"][0]["name"]) == name


def test_text_is_no_markup_except_where_markup_is_meant() -> None:
    trace = line("<b>run</b> &amp;", [1], [1.0], "--series-1", hovertext="a<br>b", hovertemplate="%{y}<extra></extra>")
    layout = {"yaxis": {"title": {"text": "reward<i>"}, "ticktext": ["<sub>"]}}
    content = content_of(figure([trace], layout, label="x"))
    drawn, y_axis = content["data"][0], content["layout"]["yaxis"]
    assert drawn["name"] == "&lt;b&gt;run&lt;/b&gt; &amp;amp;"
    assert (y_axis["title"]["text"], y_axis["ticktext"]) == ("reward&lt;i&gt;", ["&lt;sub&gt;"])
    assert (drawn["hovertext"], drawn["hovertemplate"]) == ("a<br>b", "%{y}<extra></extra>")


def test_values_that_are_not_finite_become_gaps() -> None:
    content = content_of(figure([line("x", [1, 2, 3], [1.0, math.nan, math.inf], "--series-1")], {}, label="x"))
    assert content["data"][0]["y"] == [1.0, None, None]


def test_few_steps_get_ticks_on_whole_steps_only() -> None:
    content = content_of(step_figure([line("x", [3, 4], [1.0, 2.0], "--series-1")], "y", label="x"))
    assert content["layout"]["xaxis"]["dtick"] == 1


def test_a_level_is_visible_with_one_step() -> None:
    trace = level("clip", [7], 1.0, "--series-1")
    assert trace["x"] == [6, 8]
    assert trace["y"] == [1.0, 1.0]
