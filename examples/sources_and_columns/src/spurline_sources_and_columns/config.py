"""Settings of the components. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.errors import Problem
from spurline.protocols.source import DecoratedSourceConfig, SourceConfig
from spurline_rl.losses.configs import PolicyLossConfig
from spurline_rl.protocols.advantage import AdvantageConfig


class WindowsConfig(SourceConfig):
    """Train on windows of long texts: all rows are one stream of tokens, cut into pieces of equal length."""

    name: str = "windows"
    column: str = "text"
    """Column of the rows that holds the text."""
    window_tokens: int = Field(default=512, gt=1)
    """Tokens in one window. What is left over at the end of the stream is not trained on."""


class ShortFirstConfig(DecoratedSourceConfig):
    """Begin with the first tokens of every answer, and train on whole answers later."""

    name: str = "short_first"
    first_tokens: int = Field(gt=0)
    """Tokens of an answer that carry loss at first."""
    until_step: int = Field(gt=0)
    """Last step that leaves the rest of an answer out."""


class RowWeightConfig(AdvantageConfig):
    """GRPO whose advantages are multiplied by a number of the prompt's row, named in `source.carry`."""

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
    """A policy gradient whose tokens weigh as much as a number of the prompt's row says."""

    name: str = "row_gradient"
    column: str = "weight"
    """The carried column."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        yield from not_carried(self.column, run)


def not_carried(column: str, run: RunConfig) -> Iterable[Problem]:
    """A column that the source does not take along."""
    if column not in run.source.facts.carried:
        yield Problem("column", f"is '{column}', which `carry` of the source does not name. Add it there.")
