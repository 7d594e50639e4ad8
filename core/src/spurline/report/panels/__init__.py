"""Core's report panels, one file per subject. Registered in `spurline.builtin.plugin`."""

from spurline.report.panels.data import PackingPanel, SampleLengthsPanel
from spurline.report.panels.learning import EvaluationPanel, GradientPanel, LearningRatePanel, LossPanel
from spurline.report.panels.samples import SamplesPanel
from spurline.report.panels.settings import ConfigPanel
from spurline.report.panels.speed import ThroughputPanel, TimeSplitPanel
from spurline.report.panels.summary import SummaryPanel

__all__ = [
    "ConfigPanel",
    "EvaluationPanel",
    "GradientPanel",
    "LearningRatePanel",
    "LossPanel",
    "PackingPanel",
    "SampleLengthsPanel",
    "SamplesPanel",
    "SummaryPanel",
    "ThroughputPanel",
    "TimeSplitPanel",
]
