"""Define the component kind `typical_time`, which computes the usual time of a step.

Other plugins can add components of this kind, as they do for kinds of core. Their configs derive from
`TypicalTimeConfig`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from spurline.config.section import ComponentConfig
from spurline_plugin_template.percentiles import percentile


class TypicalTimeConfig(ComponentConfig):
    """The base of settings for this kind."""

    kind: ClassVar[str] = "typical_time"


class TypicalTime(Protocol):
    """Computes how long a step usually takes. Factory: `Class(config)`."""

    def seconds(self, before: Sequence[float]) -> float:
        """Return the usual time in seconds. `before` has the seconds of at least one earlier step, in order."""
        ...


class MedianConfig(TypicalTimeConfig):
    """The median of all steps so far."""

    name: str = "median"


class Median:
    """The median, which a few slow steps hardly change."""

    def __init__(self, config: MedianConfig) -> None:
        del config

    def seconds(self, before: Sequence[float]) -> float:
        return percentile(before, 50)
