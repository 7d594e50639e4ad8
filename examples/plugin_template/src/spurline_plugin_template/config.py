"""Settings of the plugin and of its components. This module does not import torch.

Each field states its bounds. The docstring below a field appears in errors, in `spurline schema` and in editors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import Component, OnResume, Section
from spurline.errors import Problem
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.loss import LossConfig
from spurline.protocols.optimizer import OptimizerConfig, num_values
from spurline.protocols.order import OrderConfig
from spurline_insight.report_panel import ReportPanelConfig
from spurline_plugin_template.typical_time import MedianConfig, TypicalTimeConfig
from spurline_rl.protocols.reward import RewardConfig


class TemplateConfig(Section):
    """The config's top-level section `plugin_template`: how step times are judged and summarised."""

    # These settings do not change the trained weights, so a resumed run may have other values (OnResume.FREE).
    percentiles: Annotated[tuple[Annotated[float, Field(ge=0, le=100)], ...], OnResume.FREE] = (50, 90, 99)
    """Percentiles of the step time to write to RUN_DIR/step_times.json."""
    warn_factor: Annotated[float, OnResume.FREE] = Field(default=3.0, gt=1)
    """Warn about a step that takes this many times the typical time of the steps before it."""
    typical: Annotated[TypicalTimeConfig, Component("typical_time"), OnResume.FREE] = MedianConfig()
    """How to compute the typical time."""
    warm_up_steps: Annotated[int, OnResume.FREE] = Field(default=1, ge=1)
    """Number of first steps of a process to leave out, since they allocate memory and compile."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if run.steps is not None and self.warm_up_steps >= run.steps:
            yield Problem(
                "warm_up_steps",
                f"is {self.warm_up_steps}, but the run has only {run.steps} steps, so no step would be measured. "
                f"Set it below {run.steps}.",
            )


class ByDifficultyConfig(OrderConfig):
    """Sort samples by difficulty in the first epochs, and shuffle them in later epochs."""

    name: str = "by_difficulty"
    column: str = "difficulty"
    """Column with a number that is larger for harder rows. Dots in the name lead into nested objects."""
    sorted_epochs: int = Field(default=1, ge=1)
    """Number of first epochs that are sorted."""


class RowsWhereConfig(DatasetConfig):
    """Rows of another dataset that have one of these values in a column. Formats and columns are set here."""

    name: str = "rows_where"
    of: Annotated[DatasetConfig, Component("dataset", shorthand="path")]
    """The other dataset."""
    column: str
    """Column with the value."""
    values: tuple[str, ...] = Field(min_length=1)
    """Values of the rows to take, as text."""


class FocalConfig(LossConfig):
    """Cross-entropy with less weight on tokens that the model predicts well (Lin et al. 2017, arXiv:1708.02002)."""

    name: str = "focal"
    gamma: float = Field(default=2.0, ge=0, allow_inf_nan=False)
    """How strongly the weight falls with a token's probability. 0 is plain cross-entropy."""


class BalancedFocalConfig(FocalConfig):
    """The focal loss with weights whose mean over the tokens of an optimizer step is 1."""

    name: str = "balanced_focal"


ANCHOR = "anchor"
"""Role of the model that `anchored` reads: a key of `model.frozen`."""


class AnchoredConfig(LossConfig):
    """Cross-entropy, and the divergence from another model (`model.frozen.anchor`) at every trained token."""

    reads_logits: ClassVar[bool] = True

    name: str = "anchored"
    weight: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Weight of the divergence."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({ANCHOR})


class BriefConfig(RewardConfig):
    """Less reward for longer responses."""

    name: str = "brief"
    most_characters: int = Field(default=1000, gt=0)
    """Characters at which the reward is 0."""


class LionConfig(OptimizerConfig):
    """Lion (Chen et al. 2023, arXiv:2302.06675). It needs a third to a tenth of AdamW's learning rate."""

    # Each value depends only on its own gradient and momentum, so a rank can update any part of a parameter.
    needs_whole_parameters: ClassVar[str | None] = None
    is_elementwise: ClassVar[bool] = True
    steps_apart: ClassVar[bool] = True

    name: str = "lion"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.99)
    """Weight of the old momentum in the direction of a step, and in the new momentum."""

    def state_bytes(self, shapes: Mapping[str, Sequence[int]], weight_bytes: int) -> int:
        # Lion keeps one value for each weight. Adam keeps two.
        return weight_bytes * num_values(shapes)


class StepTimesPanelConfig(ReportPanelConfig):
    """Histogram of step times in the report."""

    name: str = "step_times"
    bins: int = Field(default=40, gt=0)
    """Maximum number of bars."""
