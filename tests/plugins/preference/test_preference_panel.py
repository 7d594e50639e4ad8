"""What the report shows of training on pairs: figures of a real run's metrics, shares as percent and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spurline import Run, load_config
from spurline_insight.report.panels.summary import SummaryPanel
from spurline_insight.report.record import evaluation_scores, read_record
from spurline_insight.report_panel import ReportPanel, ReportPanelConfig, RunRecord
from spurline_preference.panel import PreferencePanel


@pytest.fixture(scope="module")
def dpo_run(spurline_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """Twelve steps on sixteen pairs, evaluated on them thrice."""
    folder = tmp_path_factory.mktemp("dpo")
    rows = [
        {
            "prompt": [{"role": "user", "content": f"say {number}"}],
            "chosen": [{"role": "assistant", "content": f"{number} {number}"}],
            "rejected": [{"role": "assistant", "content": "never"}],
        }
        for number in range(16)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "run_dir": str(folder / "run"),
        "source": "preference",
        "model": {"path": str(spurline_tiny_model)},
        "data": {"train": str(folder / "pairs.jsonl"), "eval": str(folder / "pairs.jsonl"), "max_length": 128},
        "batch_size": 8,
        "steps": 12,
        "optimizer": {"learning_rate": 1e-3},
        "schedule": "constant",
        "backend": {"name": "local", "device": "cpu", "num_threads": 1},
        "evaluation": {"every_steps": 4, "generate": {"rewards": {"right": "exact_match"}, "max_new_tokens": 4}},
    }
    Run(load_config(config)).train()
    return read_record(folder / "run")


def figures(panel: type[ReportPanel], record: RunRecord) -> list[dict[str, Any]]:
    fragment = panel(ReportPanelConfig(name="any")).render(record)  # type: ignore[call-arg]
    assert fragment is not None
    return [json.loads(content) for content in re.findall(r'class="figure">(.*?)</script>', fragment)]


def traces(plots: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {trace["name"]: trace for plot in plots for trace in plot["data"]}


def test_accuracy_of_training_and_held_out_pairs_stand_on_one_axis_of_percent(dpo_run: RunRecord) -> None:
    accuracy, *_ = figures(PreferencePanel, dpo_run)
    drawn = traces([accuracy])
    assert drawn["accuracy"]["x"] == list(range(1, 13))
    assert drawn["accuracy (held out)"]["y"] == pytest.approx(dpo_run.series("eval/dpo/accuracy")[1], rel=1e-5)
    assert drawn["accuracy (held out)"]["x"] == [4, 8, 12]
    assert accuracy["layout"]["yaxis"]["tickformat"] == ".0%"
    assert drawn["chance"]["y"] == [0.5, 0.5]


def test_margins_rewards_and_likelihoods_are_numbers_and_no_percent(dpo_run: RunRecord) -> None:
    _, *others = figures(PreferencePanel, dpo_run)
    assert [plot["layout"]["yaxis"]["title"]["text"] for plot in others] == [
        "Margin between the answers",
        "Reward (beta x log-ratio)",
        "Log-probability per token",
    ]
    for plot in others:
        assert "tickformat" not in plot["layout"]["yaxis"]
        assert all("%}" not in trace["hovertemplate"] for trace in plot["data"] if trace["hovertemplate"])
    drawn = traces(others)
    assert drawn["margin (held out)"]["y"] == pytest.approx(dpo_run.series("eval/dpo/margin")[1], rel=1e-5)
    assert {"chosen", "rejected", "chosen (held out)", "rejected (held out)"} <= drawn.keys()


def test_no_headline_number_shows_a_margin_or_reward_as_percent(dpo_run: RunRecord) -> None:
    shares, others = evaluation_scores(dpo_run)
    assert shares == ["eval/dpo/accuracy", "eval/right"]
    assert "eval/dpo/margin" in others
    fragment = SummaryPanel(ReportPanelConfig(name="summary")).render(dpo_run)
    assert fragment is not None
    assert "Best dpo/accuracy" in fragment
    assert "margin" not in fragment


def test_other_runs_have_no_such_panel() -> None:
    record = RunRecord(Path("/nonexistent"), [{"step": 1, "loss": 1.0}], {})
    assert PreferencePanel(ReportPanelConfig(name="preference")).render(record) is None
