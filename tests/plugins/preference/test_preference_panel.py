"""The report panel of training on pairs: shares as percent, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spurline_insight.report.record import evaluation_scores
from spurline_insight.report_panel import ReportPanel, ReportPanelConfig, RunRecord
from spurline_preference.panel import PreferencePanel


@pytest.fixture
def run() -> RunRecord:
    """Twelve steps, evaluated on held-out pairs thrice."""
    names = ("accuracy", "margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob")
    lines = [{"step": step} | {f"preference/{name}": step / 20 for name in names} for step in range(1, 13)]
    for line in lines[3::4]:
        line |= {f"eval/preference/{name}": line["step"] / 30 for name in names} | {"eval/right": 0.5}
    return RunRecord(Path("/nonexistent"), lines, {})


def figures(panel: type[ReportPanel], record: RunRecord) -> list[dict[str, Any]]:
    fragment = panel(ReportPanelConfig(name="any")).render(record)  # type: ignore[call-arg]
    assert fragment is not None
    return [json.loads(content) for content in re.findall(r'class="figure">(.*?)</script>', fragment)]


def traces(plots: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for plot in plots for trace in plot["data"]}


def test_accuracy_of_training_and_held_out_pairs_stand_on_one_axis_of_percent(run: RunRecord) -> None:
    accuracy, *_ = figures(PreferencePanel, run)
    drawn = traces([accuracy])
    assert drawn["accuracy"]["x"] == list(range(1, 13))
    assert drawn["accuracy (held out)"]["y"] == pytest.approx(run.series("eval/preference/accuracy")[1], rel=1e-5)
    assert drawn["accuracy (held out)"]["x"] == [4, 8, 12]
    assert accuracy["layout"]["yaxis"]["tickformat"] == ".0%"
    assert drawn["chance"]["y"] == [0.5, 0.5]


def test_margins_rewards_and_likelihoods_are_numbers_and_no_percent(run: RunRecord) -> None:
    _, *others = figures(PreferencePanel, run)
    titles = [plot["layout"]["yaxis"]["title"]["text"] for plot in others]
    assert titles == ["Margin", "Reward", "Log-probability per token"]
    for plot in others:
        assert "tickformat" not in plot["layout"]["yaxis"]
        assert all("%}" not in trace["hovertemplate"] for trace in plot["data"] if trace["hovertemplate"])
    drawn = traces(others)
    assert drawn["margin (held out)"]["y"] == pytest.approx(run.series("eval/preference/margin")[1], rel=1e-5)
    assert {"chosen", "rejected", "chosen (held out)", "rejected (held out)"} <= drawn.keys()


def test_no_headline_number_shows_a_margin_or_reward_as_percent(run: RunRecord) -> None:
    shares, others = evaluation_scores(run)
    assert shares == ["eval/preference/accuracy", "eval/right"]
    assert "eval/preference/margin" in others


def test_other_runs_have_no_such_panel() -> None:
    record = RunRecord(Path("/nonexistent"), [{"step": 1, "loss": 1.0}], {})
    assert PreferencePanel(ReportPanelConfig(name="preference")).render(record) is None


def test_the_divergence_of_a_loss_on_labels_has_a_plot_of_its_own() -> None:
    lines = [{"step": step, "preference/margin": 0.1 * step, "preference/kl": 0.2 * step} for step in range(1, 4)]
    drawn = traces(figures(PreferencePanel, RunRecord(Path("/nonexistent"), lines, {})))
    assert {"margin", "KL"} == drawn.keys()
