"""Base classes of every config section, and the marks a field can carry.

Light on purpose: pydantic and the standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from spurline.errors import Problem

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class Section(BaseModel):
    """One mapping in the config file: unknown keys are errors, values cannot change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        """Checks that need other sections. Keys are relative to this section; override where a field needs one."""
        return ()


class ComponentConfig(Section):
    """Settings of one component; `name` says which implementation the registry builds."""

    run_defaults: ClassVar[Mapping[str, str]] = {}
    """For the config of a source: top-level component settings and the names they take when the file has none."""

    name: str = Field(min_length=1)
    """Which component to use."""


@dataclass(frozen=True)
class Component:
    """Mark a field as the config of a component: `Annotated[ComponentConfig, Component("collator")]`.

    kind: the registry kind that supplies the choices.
    shorthand: the setting that a bare string stands for (`collator: packed` sets `name`).
    """

    kind: str
    shorthand: str = "name"


class OnResume(Enum):
    """Mark a field that may differ between a checkpoint and the run that resumes it; all others must be equal."""

    FREE = "free"
    """Paths and logging: no influence on the trained weights."""
    MAY_GROW = "may_grow"
    """Step and epoch counts: a longer run may continue a shorter one."""
