"""What each panel shows, and that none breaks on odd runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rl_run_record import rl_metrics
from shown_panels import PANELS, figures, rendered, shown, times, traces

from spurline_insight.report.record import read_record
from spurline_insight.report_panel import RunRecord

RunDirMaker = Callable[..., Path]
NAMES = [
    "epoch", "loss", "grad_norm", "lr", "tokens", "loss_tokens", "time/step", "time/batch", "time/evaluate",
    "packing/fill", "packing/rows", "eval/loss", "eval/loss/math", "eval/exact_match",
    *rl_metrics(1), "rewards/format", "response/share_length", "policy/sequence_ratio", "policy/clip_fraction_dual",
    "policy/kl_reference", "correction/factor", "correction/truncated", "value/return",
    "eval/pass@1", "eval/pass@4", "eval/reward", "eval/rewards/format", "eval/failed",
]  # fmt: skip
PANELS_OF_OTHER_RUNS = {
    *("EnvironmentsPanel", "GroupsPanel", "HealthPanel", "MismatchPanel", "PolicyPanel", "PreferencePanel"),
    *("ResponsesPanel", "RewardPanel"),
}
SUPERVISED_PANELS = [name for name in PANELS if name not in PANELS_OF_OTHER_RUNS]


metric_values = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.floats(0, 1), st.integers(0, 10**12), st.just(0.0)
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    lines=st.lists(st.dictionaries(st.sampled_from(NAMES), metric_values), max_size=60),
    start=st.integers(1, 10**6),
    has_clipping=st.booleans(),
    has_rollouts=st.booleans(),
)
def test_no_panel_breaks_whatever_finite_metrics_a_run_recorded(
    lines: list[dict[str, float]], start: int, has_clipping: bool, has_rollouts: bool
) -> None:
    base = rl_metrics(1) if has_rollouts else {}
    record = RunRecord(
        run_dir=Path("/nonexistent"),
        metrics=[base | line | {"step": start + index} for index, line in enumerate(lines)],
        config={"optimizer": {"max_grad_norm": 1.0 if has_clipping else None}},
    )
    for name in PANELS:
        fragment = rendered(name, record)
        if fragment is not None:
            assert all(plot["data"] for plot in figures(fragment))


@pytest.mark.parametrize("name", PANELS)
def test_a_panel_without_its_data_shows_nothing(name: str, tmp_path: Path) -> None:
    assert rendered(name, RunRecord(tmp_path, [], {}, {})) is None


@pytest.mark.parametrize("num_steps", [1, 2, 15])
@pytest.mark.parametrize("name", [name for name in SUPERVISED_PANELS if name != "SamplesPanel"])
def test_every_panel_draws_short_runs(name: str, num_steps: int, make_run_dir: RunDirMaker) -> None:
    assert shown(name, read_record(make_run_dir(num_steps=num_steps)))


def test_a_run_of_100k_steps_stays_small_and_keeps_its_spike() -> None:
    lines: list[dict[str, float]] = [{"step": step, "loss": 1.0} for step in range(1, 100_001)]
    lines[70_000]["loss"] = 99.0
    record = RunRecord(Path("/nonexistent"), lines, {})
    drawn = traces(shown("LossPanel", record))
    assert all(len(trace["x"]) <= 2000 for trace in drawn.values())
    assert max(drawn["training loss"]["y"]) == 99.0


def test_training_and_evaluation_loss_share_their_axes(make_run_dir: RunDirMaker) -> None:
    drawn = traces(shown("LossPanel", read_record(make_run_dir())))
    assert drawn["evaluation loss"]["x"] == [10, 20, 30, 40]
    assert drawn["training loss"]["x"] == list(range(1, 41))
    assert len(drawn) == 3


def test_scores_between_0_and_1_are_plotted_apart_from_other_evaluation_metrics(make_run_dir: RunDirMaker) -> None:
    scores, others = figures(shown("EvaluationPanel", read_record(make_run_dir())))
    assert [trace["name"] for trace in scores["data"]] == ["exact match"]
    assert [trace["name"] for trace in others["data"]] == ["perplexity"]


def test_a_standard_error_is_a_bar_of_its_score_and_no_curve() -> None:
    lines = [{"step": step, "eval/bench/acc": 0.5, "eval/bench/acc_stderr": 0.1 * step} for step in (1, 2)]
    drawn = traces(shown("EvaluationPanel", RunRecord(Path("/nonexistent"), lines, {})))
    assert [*drawn] == ["bench/acc"]
    assert drawn["bench/acc"]["error_y"]["array"] == [0.1, 0.2]


def test_the_gradient_plot_shows_the_clipping_threshold_of_the_config(make_run_dir: RunDirMaker) -> None:
    fragment = shown("GradientPanel", read_record(make_run_dir()))
    assert traces(fragment)["clipped above 1"]["y"] == [1.0, 1.0]
    assert "28% of the steps were clipped" in fragment


def test_throughput_leaves_evaluation_out(make_run_dir: RunDirMaker) -> None:
    drawn = traces(shown("ThroughputPanel", read_record(make_run_dir())))
    assert drawn["tokens/s"]["y"] == [12_000.0] * 40


def test_the_parts_of_the_step_time_are_listed_with_their_shares(make_run_dir: RunDirMaker) -> None:
    fragment = shown("TimeSplitPanel", read_record(make_run_dir(num_steps=10)))
    assert {*times(fragment)} == {"forward + backward", "evaluate", "optimizer", "batch"}
    assert "61.5% · 4 s" in times(fragment).values()


def test_times_inside_a_part_are_named_but_not_added_and_the_rest_is_other() -> None:
    line = {"step": 1, "time/step": 1.0, "time/batch": 0.5, "time/collate": 0.4, "time/optimizer": 0.25}
    fragment = shown("TimeSplitPanel", RunRecord(Path("/nonexistent"), [line], {}))
    assert times(fragment) == {"batch": "50.0% · 0.5 s", "optimizer": "25.0% · 0.25 s", "other": "25.0% · 0.25 s"}
    assert "overlapping the above: collate 0.4 s" in fragment


def test_the_duration_of_an_evaluation_is_not_a_score() -> None:
    record = RunRecord(Path("/nonexistent"), [{"step": 1, "eval/time": 0.5, "eval/loss": 1.0}], {})
    assert rendered("EvaluationPanel", record) is None


def test_the_data_table_counts_samples_drops_and_truncations(make_run_dir: RunDirMaker) -> None:
    fragment = shown("SampleLengthsPanel", read_record(make_run_dir()))
    text = re.sub(r"<[^>]+>", " ", re.sub(r"<script.*?</script>", "", fragment))
    assert re.search(r"Samples\s+2,400\s+200", text)
    assert re.search(r"Dropped: too long\s+11\s+0", text)
    assert re.search(r"Truncated\s+40\s+2", text)
    assert re.search(r"Tokens with loss\s+41.0%\s+–", text)  # noqa: RUF001


def test_the_length_histogram_marks_max_length(make_run_dir: RunDirMaker) -> None:
    (plot,) = figures(shown("SampleLengthsPanel", read_record(make_run_dir())))
    assert plot["data"][0]["y"] == [700, 1300, 400]
    assert plot["data"][0]["width"] == [100, 100, 100]
    assert plot["layout"]["shapes"][0]["x0"] == 300


def sample(step: int, prompt: str, response: str, value: float) -> dict[str, Any]:
    return {"step": step, "prompt": prompt, "response": response, "reference": "ref", "scores": {"exact_match": value}}


def test_answers_of_the_first_and_the_latest_evaluation_stand_side_by_side(make_run_dir: RunDirMaker) -> None:
    samples = [sample(10, "p1", "old", 0), sample(20, "p1", "middle", 0.5), sample(30, "p1", "new", 1)]
    fragment = shown("SamplesPanel", read_record(make_run_dir(samples=samples)))
    assert "First answer (step 10)" in fragment
    assert "Latest answer (step 30)" in fragment
    assert re.search(r"old.*mark bad.*✗ exact match.*new.*mark good.*✓ exact match", fragment)
    assert "middle" not in fragment
    assert "Step 10: 0 of 1 correct; step 30: 1 of 1 correct" in fragment


def test_a_prompt_asked_twice_keeps_both_answers(make_run_dir: RunDirMaker) -> None:
    samples = [sample(10, "p", "first try", 0), sample(10, "p", "second try", 1)]
    fragment = shown("SamplesPanel", read_record(make_run_dir(samples=samples)))
    assert "first try" in fragment
    assert "second try" in fragment


def test_many_answers_are_folded_and_long_ones_cut(make_run_dir: RunDirMaker) -> None:
    samples = [sample(10, f"prompt {index}", "x" * 3000, 1) for index in range(20)]
    fragment = shown("SamplesPanel", read_record(make_run_dir(samples=samples)))
    assert "12 more answers" in fragment
    assert "(1,000 more characters)" in fragment


def test_settings_read_as_they_are_written_in_yaml(make_run_dir: RunDirMaker) -> None:
    fragment = shown("ConfigPanel", read_record(make_run_dir()))
    for line in ("  revision:\n", "  betas:\n  - 0.9\n  - 0.95\n", "  export_hf: true\n", "torch: 2.13.0\n"):
        assert line in fragment


def test_the_cards_hold_the_headline_numbers(make_run_dir: RunDirMaker) -> None:
    fragment = shown("SummaryPanel", read_record(make_run_dir()))
    found = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", fragment))
    assert found == {
        "Final loss": "0.4549",
        "Best eval loss": "0.5250",
        "Best exact match": "100.0%",
        "Tokens per second": "12.0k",
        "Time in steps": "0:00:26",
        "Steps": "40 / 40",
        "Tokens seen": "240k",
        "Parameters": "412k",
    }
