"""What Prometheus reads of a run."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from spurline_trackers.configs import PrometheusTrackerConfig
from spurline_trackers.prometheus import PrometheusTracker


def test_each_name_belongs_to_one_metric_as_openmetrics_wants(tmp_path: Path) -> None:
    tracker = PrometheusTracker(PrometheusTrackerConfig())
    tracker.log(0, {"eval/loss": 3.0})
    tracker.log(1, {"tokens": 100.0, "eval/pass@1": 0.5, "eval/pass_1": 0.6, "planned_steps": 7.0, "steps": 8.0})
    tracker.log(2, {"tokens": 50.0})
    registry = CollectorRegistry()
    registry.register(tracker)
    # The parser refuses a name that stands twice.
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert (values["spurline_tokens_total"], values["spurline_tokens_of_step"]) == (150.0, 50.0)
    assert (values["spurline_steps_total"], values["spurline_steps_of_step"]) == (2.0, 8.0)
    assert values["spurline_planned_steps"] == 0.0
    assert values["spurline_eval_pass_1"] == 0.5
