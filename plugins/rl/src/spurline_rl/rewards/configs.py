"""Settings of the rewards. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from spurline.config.functions import is_reference
from spurline.config.paths import FunctionSetting
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline_rl.functions import FUNCTION_PATH
from spurline_rl.protocols.reward import RewardConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class ExactMatchConfig(RewardConfig):
    """1 when the response equals the reference text, white space at both ends ignored; else 0."""

    needs_reference = True

    name: str = "exact_match"
    ignore_case: bool = False
    """Compare without regard to case."""


class FunctionRewardConfig(RewardConfig):
    """A Python function called with one argument, the `spurline_rl.protocols.reward.Answer`; may be async."""

    name: str = "function"
    path: Annotated[str, FunctionSetting(), OnResume.BY_NAME] = Field(pattern=FUNCTION_PATH)
    """`module:function`, installed, beside the config file or in the working directory; or `file.py:function`. A Python
    program may give the function itself, which is called in the run's own process."""
    timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=30.0, gt=0)
    """Seconds one call may take."""
    in_process: Annotated[bool, OnResume.FREE] = False
    """Call it in the run's own process, which cannot kill it and limits only its time. By default it is called in
    worker processes, which are killed at the limits."""
    workers: Annotated[Literal["auto"] | Annotated[int, Field(gt=0, strict=True)], OnResume.FREE] = "auto"
    """Largest number of worker processes that make one call at a time; `auto` is one per processor, from 4 to 16. The
    calls of an async function wait side by side in one process."""
    memory_gb: Annotated[float, OnResume.FREE] = Field(default=16.0, gt=0)
    """GiB of private memory of one worker process, its module included."""
    import_timeout_s: Annotated[float, OnResume.FREE] = Field(default=300.0, gt=0)
    """Seconds that importing its module may take at the start."""

    @model_validator(mode="before")
    @classmethod
    def _stay_with_objects(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and callable(cast("Mapping[str, Any]", value).get("path")):
            return {"in_process": True, **cast("Mapping[str, Any]", value)}
        return value

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if is_reference(self.path) and not self.in_process:
            yield Problem(
                "in_process",
                "is false, but the function is an object of this process, which worker processes do not have. Remove "
                "it; or write the function in a file, and name that: `my_rewards.py:is_right`.",
            )
        for name in ("workers", "memory_gb", "import_timeout_s") if self.in_process else ():
            if name in self.model_fields_set:
                yield Problem(name, "limits worker processes, but in_process: true has none. Remove one of the two.")


class MathVerifyConfig(RewardConfig):
    """1 when the response and the reference are the same mathematically; needs `pip install spurline-rl[math]`."""

    needs_reference = True

    name: str = "math_verify"
    timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=5.0, gt=0)
    """Seconds one comparison may take; an answer that takes longer counts as wrong."""
    workers: Annotated[int, OnResume.FREE] = Field(default=1, gt=0)
    """Processes that compare."""
