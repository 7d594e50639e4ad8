"""Settings of the components. This module does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.errors import Problem
from spurline.protocols.source import DecoratedSourceConfig, SourceConfig
from spurline_rl.losses.configs import PolicyLossConfig
from spurline_rl.protocols.advantage import AdvantageConfig


class WindowsConfig(SourceConfig):
    """Join all texts to one stream of tokens, and train on windows of equal length."""

    name: str = "windows"
    column: str = "text"
    """Column with the text."""
    window_tokens: int = Field(default=512, gt=1)
    """Tokens in one window. The rest at the end of the stream is not trained on."""


class ShortFirstConfig(DecoratedSourceConfig):
    """Train only on the first tokens of each answer at first, and on whole answers later."""

    name: str = "short_first"
    first_tokens: int = Field(gt=0)
    """Maximum number of tokens with loss in each answer, in the first steps."""
    until_step: int = Field(gt=0)
    """Last step that trains only on the first tokens."""


class RowWeightConfig(AdvantageConfig):
    """GRPO with advantages multiplied by a number in the prompt's row. `source.carry` must name the column."""

    name: str = "row_weight"
    column: str = "weight"
    """The carried column."""

    @property
    def smallest_group(self) -> int:
        return 2

    @property
    def divides_by_spread(self) -> bool:
        return True

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        yield from not_carried(self.column, run)


class RowGradientConfig(PolicyLossConfig):
    """A policy gradient whose tokens are weighted by a number in the prompt's row."""

    name: str = "row_gradient"
    column: str = "weight"
    """The carried column."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        yield from not_carried(self.column, run)


def not_carried(column: str, run: RunConfig) -> Iterable[Problem]:
    """Yield a problem if the source does not carry the column."""
    if column not in run.source.facts.carried:
        yield Problem("column", f"is '{column}', which `source.carry` does not name. Add it there.")
