"""What the report shows of reinforcement learning, and that it shows none of it for other runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rl_run_record import RL_SUMMARY, rl_metrics
from shown_panels import figures, rendered, shown, times, traces

from spurline_insight.report.page import write_report
from spurline_insight.report.record import read_record
from spurline_insight.report_panel import RunRecord

NOWHERE = Path("/nonexistent")
RL_PANELS = ["GroupsPanel", "MismatchPanel", "PolicyPanel", "ResponsesPanel", "RewardPanel"]
STEPS = range(1, 9)
Lines = list[dict[str, Any]]


def record_of(lines: Lines, summary: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> RunRecord:
    return RunRecord(NOWHERE, lines, config or {}, RL_SUMMARY if summary is None else summary)


def healthy() -> Lines:
    return [rl_metrics(step) for step in STEPS]


def words(fragment: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", re.sub(r"<script.*?</script>", "", fragment)))


@pytest.mark.parametrize("name", [*RL_PANELS, "HealthPanel"])
def test_a_supervised_run_shows_nothing_of_reinforcement_learning(name: str, make_run_dir: Callable[..., Path]) -> None:
    assert rendered(name, read_record(make_run_dir())) is None


def test_the_reward_stands_in_a_band_of_its_deviation_beside_held_out_rewards() -> None:
    lines = healthy()
    lines[3] |= {"eval/reward": 0.7, "eval/pass@1": 0.6, "eval/rewards/exact_match": 0.7}
    (plot,) = figures(shown("RewardPanel", record_of(lines)))
    low, high, mean, held_out = plot["data"]
    assert mean["y"] == pytest.approx([0.41, 0.42, 0.43, 0.44, 0.45, 0.46, 0.47, 0.48])
    assert low["y"][4] == pytest.approx(sum(mean["y"][2:7]) / 5 - 0.3)
    assert high["y"][4] == pytest.approx(sum(mean["y"][2:7]) / 5 + 0.3)
    assert high["fill"] == "tonexty"
    assert (held_out["x"], held_out["y"]) == ([4], [0.7])


def test_each_reward_term_is_drawn_where_there_are_several() -> None:
    lines = [rl_metrics(step, rewards__format=1.0, eval__rewards__format=0.5) for step in STEPS]
    assert len(figures(shown("RewardPanel", record_of(healthy())))) == 1
    _, terms = figures(shown("RewardPanel", record_of(lines)))
    assert {trace["name"] for trace in terms["data"]} == {"exact match", "format", "format (held out)"}


def test_groups_say_what_became_of_every_prompt() -> None:
    lines = healthy()
    assert "Of 256 prompts drawn: 256 trained on" in words(shown("GroupsPanel", record_of(lines)))
    assert len(figures(shown("GroupsPanel", record_of(lines)))) == 1
    lines[2] |= {"groups/drawn": 40, "groups/filtered": 6, "groups/quarantined": 2, "groups/retries": 5}
    lines[2] |= {"groups/refill_missing": 1}
    fragment = shown("GroupsPanel", record_of(lines))
    assert (
        "Mean 25.0% of groups with equal rewards. Of 264 prompts drawn: 256 trained on (1 of them in spite of equal "
        "rewards), 6 left out for equal rewards, 2 given up, 5 attempts made again"
    ) in words(fragment)
    drawn = traces(fragment)
    assert drawn["left out"]["y"] == [0, 0, 0.15, 0, 0, 0, 0, 0]


def test_an_ending_that_a_step_did_not_see_has_a_share_of_zero_there() -> None:
    lines = healthy()
    lines[1] |= {"response/share_length": 0.25, "response/share_stop": 0.75, "response/length_length": 20}
    lengths, endings = figures(shown("ResponsesPanel", record_of(lines)))
    shares = {trace["name"]: trace["y"] for trace in endings["data"]}
    assert shares["cut off at the limit"] == [0, 0.25, 0, 0, 0, 0, 0, 0]
    assert shares["stopped"] == [1, 0.75, 1, 1, 1, 1, 1, 1]
    by_name = {trace["name"]: trace for trace in lengths["data"]}
    assert (by_name["cut off at the limit"]["x"], by_name["cut off at the limit"]["y"]) == ([2], [20])


def test_responses_that_all_stopped_are_said_to() -> None:
    assert "every response ended by itself" in shown("ResponsesPanel", record_of(healthy()))
    several = [rl_metrics(step, response__turns=2.5) for step in STEPS]
    assert "in 2.5 turns" in shown("ResponsesPanel", record_of(several))


def test_several_updates_show_clipping_ratios_and_both_divergences() -> None:
    moved = {"policy__ratio__max": 3.0, "policy__ratio__min": 0.2, "policy__kl_old": 0.01, "policy__kl_reference": 0.02}
    lines = [rl_metrics(step, policy__clip_fraction_high=0.04, **moved) for step in STEPS]
    fragment = shown("PolicyPanel", record_of(lines))
    drawn = traces(fragment)
    assert drawn["clipped: high"]["y"] == [0.04] * 8
    assert drawn["before the update"]["y"] == [0.01] * 8
    assert drawn["reference model"]["y"] == [0.02] * 8


def test_the_mismatch_is_drawn_to_its_powers_of_ten_without_what_has_none() -> None:
    lines = healthy()
    lines[0]["mismatch/kl"] = -1e-17
    drawn = traces(shown("MismatchPanel", record_of(lines)))
    assert drawn["KL"]["y"] == [None] + [1e-5] * 7
    assert drawn["mean |difference|"]["y"] == [0.002] * 8
    assert drawn["warning above 0.05 on average"]["y"] == [0.05, 0.05]
    assert drawn["1st to 99th percentile"]["y"] == [1.02] * 8


def test_older_tokens_are_told_as_drift_and_held_against_no_bound() -> None:
    lines = [rl_metrics(step, staleness__mean=0.0) for step in STEPS]
    lines[-1] |= {"mismatch/logprob_diff": 0.3, "staleness/mean": 1.5}
    fragment = shown("MismatchPanel", record_of(lines))
    assert "Mean difference 0.002000 nats, at most 0.002000 on tokens of the current weights (usually below" in fragment
    assert "Mean difference 0.3000 nats, at most 0.3000 on tokens of older" in fragment
    assert traces(fragment)["warning above 0.05 on average"]["x"] == [STEPS[0], STEPS[-2]]
    only_older = shown("MismatchPanel", record_of(lines[-1:]))
    assert "drift" in only_older
    assert "usually below" not in only_older
    assert "warning above 0.05 on average" not in traces(only_older)


def test_troubles_are_listed_once_each_with_their_steps_the_most_frequent_first() -> None:
    assert rendered("HealthPanel", record_of(healthy())) is None
    lines = [rl_metrics(step) for step in range(1, 31)]
    lines[11]["groups/quarantined"] = 2
    for index in (2, 3, 4, 20):
        lines[index]["response/share_length"] = 0.5
    cut, given_up = re.findall(r"<li>(.*?)</li>", shown("HealthPanel", record_of(lines)))
    assert "50% of responses were cut off" in cut
    assert "Steps 3 to 21 (4 of 30)" in cut
    assert "2 prompts had to be given up" in given_up
    assert "Step 12 (1 of 30)" in given_up


def test_generation_and_training_speed_are_each_over_their_own_time() -> None:
    fragment = shown("ThroughputPanel", record_of(healthy()))
    assert "Mean 8.00k tokens/s in training, 4.00k in generation" in fragment
    assert {name: trace["y"] for name, trace in traces(fragment).items()} == {
        "training": [8000] * 8,
        "generation": [4000] * 8,
    }


def test_generating_and_looking_back_are_taken_out_of_the_batch_they_are_part_of() -> None:
    fragment = shown("TimeSplitPanel", record_of([rl_metrics(1)]))
    assert [(name, found.partition(" · ")[2]) for name, found in times(fragment).items()] == [
        ("generate", "1 s"),
        ("forward + backward", "0.4 s"),
        ("rest of the batch", "0.25 s"),
        ("look back (forward)", "0.25 s"),
        ("optimizer", "0.1 s"),
    ]
    assert "overlapping" not in fragment


def test_generation_that_goes_on_during_the_update_is_not_added() -> None:
    fragment = shown("TimeSplitPanel", record_of([rl_metrics(1, time__batch=0.3)]))
    assert "generate" not in times(fragment)
    assert "overlapping the above: generate 1 s, look back (forward) 0.25 s" in fragment


def test_the_cards_lead_with_the_reward_and_the_pass_rate() -> None:
    lines = healthy()
    lines[-1] |= {"eval/pass@1": 0.953, "eval/pass@4": 0.99, "eval/reward": 0.97, "eval/rewards/exact_match": 0.97}
    found = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", shown("SummaryPanel", record_of(lines))))
    assert found == {
        "Final reward": "0.4800",
        "Best pass@1": "95.3%",
        "Best pass@4": "99.0%",
        "Tokens per second": "8.00k",
        "Generated per second": "4.00k",
        "Time in steps": "0:00:16",
        "Steps": "8 / 8",
        "Tokens seen": "64.0k",
    }


def test_evaluation_shows_pass_rates_and_leaves_rewards_and_counts_out_of_them() -> None:
    lines = healthy()
    lines[-1] |= {"eval/pass@1": 0.5, "eval/pass@4": 0.75, "eval/reward": 0.6, "eval/rewards/exact_match": 0.6}
    (plot,) = figures(shown("EvaluationPanel", record_of(lines)))
    assert [trace["name"] for trace in plot["data"]] == ["pass@1", "pass@4"]
    assert plot["layout"]["yaxis"]["tickformat"] == ".0%"
    lines[-1]["eval/failed"] = 1
    assert "Held-out prompts given up: 1 at step 8. They count as failed" in shown("EvaluationPanel", record_of(lines))


def test_the_loss_of_a_policy_is_not_given_in_nats() -> None:
    fragment = shown("LossPanel", record_of(healthy()))
    assert "nats" not in fragment
    assert "The reward shows whether training works" in fragment


def test_prompts_are_counted_without_what_is_not_known_of_them() -> None:
    fragment = shown("SampleLengthsPanel", record_of(healthy()))
    assert words(fragment).split(" GRPO")[0].strip() == (
        "train eval Prompts 2,400 200 of sort 2,000 200 of count 400 Step 32 prompts x 8 attempts"
    )
    assert "GRPO: &lt;each&gt; return" in fragment


def attempt(step: int, **changes: Any) -> dict[str, Any]:
    base = {"step": step, "prompt": "1+1", "response": "2", "reference": "2"}
    return base | {"scores": {"exact_match": 1.0, "overlong": 0.0}, "reward": 1.0, "passed": True} | changes


def test_attempts_show_their_verdict_and_each_reward_term(make_run_dir: Callable[..., Path]) -> None:
    failed = attempt(10, scores={"exact_match": 1.0, "overlong": -0.5}, reward=0.5, passed=False)
    fragment = shown("SamplesPanel", read_record(make_run_dir(samples=[failed, attempt(20)])))
    assert "Step 10: 0 of 1 passed; step 20: 1 of 1 passed" in fragment
    first, latest = re.findall(r'<div class="marks">(.*?)</div>', fragment)
    assert re.findall(r">(.*?)</span>", first) == ["✗ failed, reward 0.5", "exact match 1", "overlong -0.5"]
    assert re.findall(r">(.*?)</span>", latest) == ["✓ passed, reward 1", "exact match 1", "overlong 0"]
    assert first.count("mark bad") == latest.count("mark good") == 1


def test_a_conversation_reads_turn_by_turn(make_run_dir: Callable[..., Path]) -> None:
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "It is <2>."},
    ]
    fragment = shown("SamplesPanel", read_record(make_run_dir(samples=[attempt(1, response=turns)])))
    (transcript,) = re.findall(r'<div class="answer turns">(.*?)</div>', fragment, flags=re.DOTALL)
    assert transcript == (
        "assistant:\n{&quot;tool_calls&quot;: [{&quot;name&quot;: &quot;add&quot;, &quot;arguments&quot;: "
        "{&quot;a&quot;: 1}}]}\n\ntool:\n2\n\nassistant:\nIt is &lt;2&gt;."
    )


def test_the_page_of_a_run_of_rollouts_has_every_subject(tmp_path: Path, panels: list[Any]) -> None:
    lines = [rl_metrics(step, response__share_length=0.5) for step in STEPS]
    lines[-1] |= {"eval/pass@1": 0.5, "eval/reward": 0.5}
    page = write_report(RunRecord(tmp_path, lines, {"seed": 1}, RL_SUMMARY), panels, tmp_path / "report.html")
    titles = re.findall(r'<section class="panel"><h2>(.*?)</h2>', page.read_text(encoding="utf-8"))
    assert titles == [
        "Summary", "Health", "Reward", "Loss", "Evaluation", "Groups", "Responses", "Policy",
        "Mismatch of rollout and trainer", "Learning rate", "Gradient norm", "Throughput", "Where the time goes",
        "Data", "Configuration",
    ]  # fmt: skip


def test_named_evaluations_by_rollouts_are_drawn_beside_that_of_data_eval() -> None:
    lines = healthy()
    lines[3] |= {"eval/pass@1": 0.5, "eval/reward": 0.7, "eval/hard/pass@1": 0.1, "eval/hard/reward": -0.2}
    lines[3] |= {"eval/hard/rewards/exact_match": 0.1, "eval/hard/failed": 2.0, "eval/hard/time": 3.0}
    record = record_of(lines, config={"evaluations": {"hard": {"name": "rollouts"}}})
    drawn = traces(shown("RewardPanel", record))
    assert drawn["held-out reward"]["y"] == [0.7]
    assert drawn["hard reward"]["y"] == [-0.2]
    evaluation = shown("EvaluationPanel", record)
    assert list(traces(evaluation)) == ["hard/pass@1", "pass@1"]
    assert "Held-out prompts given up: hard: 2 at step 4." in words(evaluation)


def test_answers_are_shown_under_the_name_of_their_evaluation(tmp_path: Path) -> None:
    answers = [
        {"step": 1, "prompt": "a", "response": "b"},
        {"step": 1, "evaluation": "hard", "prompt": "a", "response": "c"},
    ]
    (tmp_path / "eval_samples.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    fragment = shown("SamplesPanel", RunRecord(tmp_path, [], {}))
    assert fragment.index(">b<") < fragment.index("<h3>hard</h3>") < fragment.index(">c<")
