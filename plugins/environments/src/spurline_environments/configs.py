"""Settings of the environments of this package. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from spurline.config.section import OnResume
from spurline.errors import Problem, listing, suggestion
from spurline_rl.environments.configs import RewardedEnvironmentConfig
from spurline_rl.function_settings import FunctionSetting, name_of
from spurline_rl.functions import FUNCTION_PATH

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig

BUILT_IN_TOOLS = {"calculator": "spurline_environments.calculator:calculator"}
"""Built-in tools, which a config may name without a module."""


def _named_tools(value: Any) -> Any:
    """Turn a list of tools into a mapping by name. Return other values unchanged."""
    if not isinstance(value, (list, tuple)):
        return value
    return {name_of(tool) if callable(tool) else tool: tool for tool in value}


class ToolsConfig(RewardedEnvironmentConfig):
    """A conversation in which the model may call Python functions. The model's last turn is the answer."""

    retired: ClassVar[tuple[str, ...]] = ("max_calls_per_turn", "max_result_characters")
    name: str = "tools"
    tools: Annotated[dict[str, Annotated[str, FunctionSetting()]], BeforeValidator(_named_tools), OnResume.BY_NAME] = (
        Field(default={"calculator": "calculator"}, min_length=1)
    )
    """Maps the names that the model uses to functions: `module:function`, `file.py:function`, or the built-in
    `calculator`. A Python program may pass the functions themselves."""
    max_turns: Annotated[int, OnResume.BY_NAME] = Field(default=8, gt=0)
    """Largest number of turns of the model, including the answer."""
    tool_timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=10.0, gt=0)
    """Seconds that a call may take. If it takes longer, the model gets an error."""
    failed_call_reward: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, allow_inf_nan=False)
    """Reward of each turn with a failed call: a malformed call, a call of an unknown tool, or an error of the tool."""
    history: Literal["exact", "retokenize"] = "exact"
    """How the prompt of a later turn is made. `exact` continues the tokens of the turn before. A chat template that
    rewrites history then causes an error. `retokenize` renders and encodes each prompt again, as at inference."""

    @property
    def most_turns(self) -> int:
        return self.max_turns

    @property
    def tool_names(self) -> Collection[str]:
        return self.tools

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        for name, path in self.tools.items():
            if path not in BUILT_IN_TOOLS and not re.match(FUNCTION_PATH, path):
                yield Problem(
                    f"tools.{name}",
                    f"is '{path}', which is neither `module:function`, `file.py:function` nor a built-in tool."
                    f"{suggestion(path, BUILT_IN_TOOLS)} Built-in: {listing(BUILT_IN_TOOLS)}.",
                )
