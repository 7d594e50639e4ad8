"""Core's report panels, one file per subject; `builtin.py` names them."""

from spurline.report.panels.data import PackingPanel, SampleLengthsPanel
from spurline.report.panels.learning import EvaluationPanel, GradientPanel, LearningRatePanel, LossPanel
from spurline.report.panels.policy import MismatchPanel, PolicyPanel
from spurline.report.panels.rollouts import GroupsPanel, ResponsesPanel, RewardPanel
from spurline.report.panels.samples import SamplesPanel
from spurline.report.panels.speed import ThroughputPanel, TimeSplitPanel
from spurline.report.panels.summary import ConfigPanel, HealthPanel, SummaryPanel

__all__ = [
    "ConfigPanel",
    "EvaluationPanel",
    "GradientPanel",
    "GroupsPanel",
    "HealthPanel",
    "LearningRatePanel",
    "LossPanel",
    "MismatchPanel",
    "PackingPanel",
    "PolicyPanel",
    "ResponsesPanel",
    "RewardPanel",
    "SampleLengthsPanel",
    "SamplesPanel",
    "SummaryPanel",
    "ThroughputPanel",
    "TimeSplitPanel",
]
