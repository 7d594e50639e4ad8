"""Settings of a model that several backends share. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Literal

from pydantic import Field

from spurline.config.section import OnResume, Section
from spurline.errors import ConfigError


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through peft; needs `pip install spurline[lora]`."""

    rank: int = Field(default=16, gt=0)
    """Rank of the update matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update is alpha / rank."""
    dropout: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Module names to adapt."""


def check_peft() -> None:
    """Raise ConfigError where the library for adapters is missing."""
    if find_spec("peft") is None:
        raise ConfigError.at("backend.lora", "needs peft, which is not installed. Run `pip install 'spurline[lora]'`.")
