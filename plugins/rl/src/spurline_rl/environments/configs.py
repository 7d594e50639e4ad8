"""Settings of the environments. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field

from spurline.config.section import OnResume
from spurline.errors import Problem, listing, suggestion
from spurline_rl.function_settings import FunctionSetting, name_of
from spurline_rl.functions import FUNCTION_PATH
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.reward import RewardTable

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


BUILT_IN_TOOLS = {"calculator": "spurline_rl.environments.calculator:calculator"}
"""Built-in tools, which a config may name without a module."""


class RewardedEnvironmentConfig(EnvironmentConfig):
    """Base of the configs of environments that score an attempt with reward components."""

    rewards: RewardTable = Field(min_length=1)
    """Rewards by name. Each is a component, or a function as `module:function` or `file.py:function`.
    `source.reward_weights` sets their weights."""

    @property
    def reward_terms(self) -> Collection[str]:
        return self.rewards


class SingleTurnConfig(RewardedEnvironmentConfig):
    """One prompt and one answer, which is scored."""

    name: str = "single_turn"


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


class CustomConfig(EnvironmentConfig):
    """An environment of your own, without a plugin."""

    name: str = "custom"
    path: Annotated[str, FunctionSetting(method="run"), OnResume.BY_NAME] = Field(pattern=FUNCTION_PATH)
    """`module:Class` or `file.py:Class`, built as `Class(config, registry=..., tokenizer=..., data=...)`, or an async
    function `(task, policy)`. A Python program may pass the class, an object with `run`, or the function."""
    max_turns: Annotated[int, OnResume.BY_NAME] = Field(default=1, gt=0)
    """Largest number of responses in one attempt. It is used only to estimate memory and lengths."""
    rewards: RewardTable = {}
    """Named reward terms, for environments that make them with `spurline_rl.scoring.make_rewards`."""

    @property
    def reward_terms(self) -> Collection[str] | None:
        return self.rewards or None

    @property
    def most_turns(self) -> int:
        return self.max_turns


def as_environment(value: Any) -> Any:
    """Turn an object, or a path such as `file.py:Class`, into settings of `custom`. Return other values unchanged."""
    is_written = isinstance(value, (str, Mapping, BaseModel))
    is_given = not is_written and (callable(value) or callable(getattr(value, "run", None)))
    if is_given or (isinstance(value, str) and ":" in value):
        return {"name": "custom", "path": value}
    return cast("Any", value)
