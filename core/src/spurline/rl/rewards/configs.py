"""Settings of core's rewards. Light: imports no torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from spurline.config.paths import FunctionSetting
from spurline.config.section import OnResume
from spurline.protocols.reward import RewardConfig
from spurline.rl.functions import FUNCTION_PATH


class ExactMatchConfig(RewardConfig):
    """1 when the response equals the reference text, white space at both ends ignored; else 0."""

    name: str = "exact_match"
    ignore_case: bool = False
    """Compare without regard to case."""


class FunctionRewardConfig(RewardConfig):
    """A Python function called with one argument, the `spurline.protocols.reward.Answer`; may be async."""

    name: str = "function"
    path: Annotated[str, FunctionSetting(), OnResume.BY_NAME] = Field(pattern=FUNCTION_PATH)
    """`module:function`, installed, beside the config file or in the working directory; or `file.py:function`."""
    timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=30.0, gt=0)
    """Seconds one call may take."""


class MathVerifyConfig(RewardConfig):
    """1 when the response and the reference are the same mathematically; needs `pip install spurline[math]`."""

    name: str = "math_verify"
    timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=5.0, gt=0)
    """Seconds one comparison may take; an answer that takes longer counts as wrong."""
    workers: Annotated[int, OnResume.FREE] = Field(default=1, gt=0)
    """Processes that compare."""


class PrefixMatchConfig(RewardConfig):
    """Share of the reference's words that the response has right before its first mistake, between 0 and 1."""

    name: str = "prefix_match"
