"""Settings of the rewards. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline_rl.functions import FUNCTION_PATH, FunctionSetting, is_reference
from spurline_rl.protocols.reward import RewardConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class ExactMatchConfig(RewardConfig):
    """1 if the response equals the reference text, else 0. White space at both ends is ignored."""

    needs_reference = True

    name: str = "exact_match"
    ignore_case: bool = False
    """Ignore upper and lower case."""


class FunctionRewardConfig(RewardConfig):
    """A Python function, plain or async. Its one argument is a `spurline_rl.protocols.reward.Answer`."""

    name: str = "function"
    path: Annotated[str, FunctionSetting(), OnResume.BY_NAME] = Field(pattern=FUNCTION_PATH)
    """`file.py:function`, or `module:function`. The module may be installed, beside the config file or in the working
    directory. A Python program may pass the function itself, which is called in the run's own process."""
    timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=30.0, gt=0)
    """Seconds that one call may take."""
    in_process: Annotated[bool, OnResume.FREE] = False
    """Call the function in the run's own process, where `timeout_s` ends the wait for a call, but not the call. If
    false, the function is called in worker processes, which are killed if they exceed a limit."""
    workers: Annotated[Literal["auto"] | Annotated[int, Field(gt=0, strict=True)], OnResume.FREE] = "auto"
    """Largest number of worker processes. Each makes one call at a time. `auto` is one per processor, but at
    least 4 and at most 16. All calls of an async function run side by side in one process."""
    memory_gb: Annotated[float, OnResume.FREE] = Field(default=16.0, gt=0)
    """GiB of private memory that one worker process may take, including the imported modules."""
    import_timeout_s: Annotated[float, OnResume.FREE] = Field(default=300.0, gt=0)
    """Seconds that the import of the function's module may take."""

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
                "in_process; or write the function in a file and name the file: `my_rewards.py:is_right`.",
            )
        for name in ("workers", "memory_gb", "import_timeout_s") if self.in_process else ():
            if name in self.model_fields_set:
                yield Problem(name, "limits worker processes, but in_process: true uses none. Remove one of the two.")


class MathVerifyConfig(RewardConfig):
    """1 if the response and the reference are mathematically equal, else 0. Needs `pip install spurline-rl[math]`."""

    needs_reference = True

    name: str = "math_verify"
    timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=5.0, gt=0)
    """Seconds that one comparison may take. An answer that takes longer counts as wrong."""
    workers: Annotated[int, OnResume.FREE] = Field(default=1, gt=0)
    """Number of worker processes that compare."""
