"""Define the kind `typical_time`, which this plugin opens: the usual time of a step, with which slow ones are compared.

Another plugin offers a component of this kind as of core's kinds: it derives a config from `TypicalTimeConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from spurline.config.section import ComponentConfig
from spurline_plugin_template.percentiles import percentile


class TypicalTimeConfig(ComponentConfig):
    """Base of the settings of a typical time."""

    kind: ClassVar[str] = "typical_time"


class TypicalTime(Protocol):
    """Says how long a step usually takes. Factory: `Class(config)`."""

    def seconds(self, before: Sequence[float]) -> float:
        """Return the usual time, given the seconds of the steps `before` in order, of which there is at least one."""
        ...


class MedianConfig(TypicalTimeConfig):
    """The median of all steps so far."""

    name: str = "median"


class Median:
    """The median, which a few slow steps do not move."""

    def __init__(self, config: MedianConfig) -> None:
        del config

    def seconds(self, before: Sequence[float]) -> float:
        return percentile(before, 50)
