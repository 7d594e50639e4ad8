"""Settings of the plugin and of its components; imports no torch.

Bounds are in the fields; a docstring below a field is its documentation in errors, in `spurline schema` and in editors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import Component, OnResume, Section
from spurline.errors import Problem
from spurline.protocols.loss import LossConfig
from spurline.protocols.optimizer import OptimizerConfig, num_values
from spurline.protocols.order import OrderConfig
from spurline_insight.report_panel import ReportPanelConfig
from spurline_plugin_template.typical_time import MedianConfig, TypicalTimeConfig


class TemplateConfig(Section):
    """The config's top-level section `plugin_template`: how step times are judged and summarised."""

    # OnResume.FREE: observing does not change the trained weights, so a resumed run may have other values.
    percentiles: Annotated[tuple[Annotated[float, Field(ge=0, le=100)], ...], OnResume.FREE] = (50, 90, 99)
    """Percentiles of the step time to write to RUN_DIR/step_times.json."""
    warn_factor: Annotated[float, OnResume.FREE] = Field(default=3.0, gt=1)
    """Warn about a step that takes this many times the typical time of the steps before it."""
    typical: Annotated[TypicalTimeConfig, Component("typical_time"), OnResume.FREE] = MedianConfig()
    """Which time is typical."""
    warm_up_steps: Annotated[int, OnResume.FREE] = Field(default=1, ge=1)
    """First steps of a process, left out of the statistics: they allocate memory and compile."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if run.steps is not None and self.warm_up_steps >= run.steps:
            yield Problem(
                "warm_up_steps",
                f"is {self.warm_up_steps}, but the run has only {run.steps} steps: nothing would be measured. "
                f"Set it below {run.steps}.",
            )


class ByDifficultyConfig(OrderConfig):
    """Samples in rising difficulty during the first epochs, shuffled afterwards."""

    name: str = "by_difficulty"
    column: str = "difficulty"
    """Column of the rows that holds a number, larger for harder; dots lead into objects."""
    sorted_epochs: int = Field(default=1, ge=1)
    """Epochs that are sorted."""


class FocalConfig(LossConfig):
    """Cross-entropy that fades out for tokens the model already predicts well (Lin et al. 2017, arXiv:1708.02002)."""

    name: str = "focal"
    gamma: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """How fast confident tokens fade; 0 is plain cross-entropy."""


class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023, arXiv:2302.06675); it wants a third to a tenth of AdamW's learning rate."""

    # Each value changes by its own gradient and momentum, so a rank can have some rows, or some values, alone.
    needs_whole_parameters: ClassVar[str | None] = None
    is_elementwise: ClassVar[bool] = True
    steps_apart: ClassVar[bool] = True

    name: str = "lion"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Share of the momentum in a step's direction, and of the momentum that is kept."""

    def state_bytes(self, shapes: Mapping[str, Sequence[int]], weight_bytes: int) -> int:
        return weight_bytes * num_values(shapes)  # one momentum for each weight, where Adam has two


class StepTimesPanelConfig(ReportPanelConfig):
    """Histogram of step times in the report."""

    name: str = "step_times"
    bins: int = Field(default=40, gt=0)
    """Bars of the histogram, at most."""
