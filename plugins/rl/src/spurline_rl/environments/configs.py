"""Settings of the environments. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, Field

from spurline.config.section import OnResume
from spurline_rl.functions import FUNCTION_PATH, FunctionSetting
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.reward import RewardTable


class RewardedEnvironmentConfig(EnvironmentConfig):
    """Base of the configs of environments that score an attempt with reward components."""

    rewards: RewardTable = Field(min_length=1)
    """Rewards by name. Each is a component, or a function as `module:function` or `file.py:function`.
    `source.reward_weights` sets their weights."""

    @property
    def reward_terms(self) -> Collection[str] | None:
        return self.rewards or None


class SingleTurnConfig(RewardedEnvironmentConfig):
    """One prompt and one answer, which is scored."""

    name: str = "single_turn"


class CustomConfig(RewardedEnvironmentConfig):
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
    def most_turns(self) -> int:
        return self.max_turns


def as_environment(value: Any) -> Any:
    """Turn an object, or a path such as `file.py:Class`, into settings of `custom`. Return other values unchanged."""
    is_written = isinstance(value, (str, Mapping, BaseModel))
    is_given = not is_written and (callable(value) or callable(getattr(value, "run", None)))
    if is_given or (isinstance(value, str) and ":" in value):
        return {"name": "custom", "path": value}
    return cast("Any", value)
