"""Settings of the environments of this package. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import BeforeValidator, Field

from spurline.config.section import Component, ComponentConfig, OnResume, Section
from spurline.errors import Problem, listing, suggestion
from spurline_rl.environments.configs import RewardedEnvironmentConfig, as_environment
from spurline_rl.evaluation_configs import terms_by_environment, unknown_environment
from spurline_rl.functions import FUNCTION_PATH, FunctionSetting, name_of
from spurline_rl.protocols.advantage import AdvantageConfig
from spurline_rl.protocols.environment import EnvironmentConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig

BUILT_IN_TOOLS = {"calculator": "spurline_environments.calculator:calculator"}
"""Built-in tools, which a config may name without a module."""


class ToolFormatConfig(ComponentConfig):
    """A format in which a model writes reasoning and tool calls. The formats of this package have no settings."""

    kind: ClassVar[str] = "tool_format"


class AutoFormatConfig(ToolFormatConfig):
    """The format of the model's family, found by the marks in its chat template."""

    name: str = "auto"


class VllmFormatConfig(ToolFormatConfig):
    """A format that vLLM can read. Needs vLLM where the run is."""

    name: str = "vllm"
    parser: str
    """Name of vLLM's tool parser (its `--tool-call-parser`)."""
    reasoning: str | None = None
    """Name of vLLM's reasoning parser (its `--reasoning-parser`). If null, turns have no reasoning."""


ToolFormatSetting = Annotated[Annotated[ToolFormatConfig, Component("tool_format")], OnResume.BY_NAME]
"""The setting `tool_format` of an environment."""


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
    tool_format: ToolFormatSetting = AutoFormatConfig()
    """How the model writes tool calls and reasoning. `auto` finds the format in the chat template."""
    history: Literal["exact", "retokenize"] = "exact"
    """How the prompt of a later turn is made. `exact` continues the tokens of the turn before. If the chat template
    changes what an earlier turn says, the conversation forks. `retokenize` encodes each prompt again."""

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


class AttemptLimits(Section):
    """Limits of the attempts in one environment."""

    max_new_tokens: Annotated[int | None, OnResume.BY_NAME] = Field(default=None, gt=0)
    """Largest number of tokens in the response of one turn; null is that of `source.sampling`."""
    attempt_timeout_s: Annotated[float | None, OnResume.BY_NAME] = Field(default=None, gt=0)
    """Seconds that one attempt may take; null is that of `source.faults`."""


def _as_environments(value: Any) -> Any:
    """Let each environment have the short forms of `source.environment`."""
    if not isinstance(value, Mapping):
        return value
    return {label: as_environment(part) for label, part in cast("Mapping[str, Any]", value).items()}


class ByRowConfig(EnvironmentConfig):
    """Several environments in one run. Each row names its own in a column."""

    name: str = "by_row"
    column: str = Field(default="environment", min_length=1)
    """Column whose value is the label of the row's environment. Dots lead into objects, as in `meta.domain`."""
    environments: Annotated[
        dict[str, Annotated[EnvironmentConfig, Component("environment")]], BeforeValidator(_as_environments)
    ] = Field(min_length=1)
    """The environments by label, each with its own rewards and settings."""
    limits: Annotated[dict[str, AttemptLimits], OnResume.BY_NAME] = {}
    """Limits of single environments, by label."""

    @property
    def by_label(self) -> Mapping[str, EnvironmentConfig]:
        return self.environments

    @property
    def reward_terms(self) -> Collection[str] | None:
        """Return the terms of all environments; None if those of one are not known beforehand."""
        terms = [part.reward_terms for part in self.environments.values()]
        return None if None in terms else {name for names in terms for name in names or ()}

    @property
    def model_rewards(self) -> Mapping[str, str]:
        return {term: role for part in self.environments.values() for term, role in part.model_rewards.items()}

    @property
    def most_turns(self) -> int:
        return max(part.most_turns for part in self.environments.values())

    def turn_tokens(self, label: str, max_new_tokens: int) -> int:
        return self.limits.get(label, AttemptLimits()).max_new_tokens or max_new_tokens

    @property
    def tool_names(self) -> Collection[str]:
        return {name for part in self.environments.values() for name in part.tool_names}

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        for label in self.environments:
            if not re.fullmatch(r"[\w.-]+", label):
                yield Problem(f"environments.{label}", "has characters that names of metrics cannot have.")
        if "env" in run.evaluations:
            yield Problem(
                "name", "is by_row, whose scores are named eval/env/..., as those of evaluations.env. Rename it."
            )
        sampling = run.source.facts.sampling
        longest = None if sampling is None else sampling.max_new_tokens
        for label, limits in self.limits.items():
            asked = limits.max_new_tokens
            if label not in self.environments:
                yield Problem(f"limits.{label}", unknown_environment(label, self.environments))
            elif asked is not None and longest is not None and asked > longest:
                yield Problem(
                    f"limits.{label}.max_new_tokens",
                    f"is {asked}, more than source.sampling.max_new_tokens: {longest}, the limit of every turn. Lower "
                    "it, or raise that one.",
                )
        for term, role in self.model_rewards.items():
            parts = {label: part for label, part in self.environments.items() if term in (part.reward_terms or ())}
            if other := [label for label, part in parts.items() if part.model_rewards.get(term) != role]:
                yield Problem(
                    f"environments.{other[0]}.rewards.{term}",
                    f"has the name of a reward of another environment that the model '{role}' gives. Rename it.",
                )


class ByEnvironmentConfig(AdvantageConfig):
    """Another advantage per environment. Statistics over several groups are those of one environment."""

    has_parts: ClassVar[bool] = True

    name: str = "by_environment"
    advantages: dict[str, Annotated[AdvantageConfig, Component("advantage")]] = {}
    """Advantages of single environments, by label."""
    other: Annotated[AdvantageConfig, Component("advantage")]
    """Advantage of the environments that `advantages` does not name. The default is `grpo`."""

    @property
    def _all(self) -> Sequence[AdvantageConfig]:
        return [*self.advantages.values(), self.other]

    @property
    def uses_critic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return any(part.uses_critic for part in self._all)

    @property
    def learns_from_rewards(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(part.learns_from_rewards for part in self._all)

    @property
    def reads_rewards(self) -> bool:
        return any(part.reads_rewards for part in self._all)

    @property
    def roles(self) -> frozenset[str]:
        return frozenset[str]().union(*(part.roles for part in self._all))

    @property
    def smallest_group(self) -> int:
        return max(part.smallest_group for part in self._all)

    @property
    def divides_by_spread(self) -> bool:
        return any(part.divides_by_spread for part in self._all)

    @property
    def compares_returns(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(part.compares_returns for part in self._all)

    def part(self, label: str) -> tuple[str, AdvantageConfig]:
        if label in self.advantages:
            return f"advantage.advantages.{label}", self.advantages[label]
        return "advantage.other", self.other

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        environments = terms_by_environment(run.source)
        if "" in environments:
            yield Problem("name", "is by_environment, but the run has one environment. Choose its advantage itself.")
        for label in self.advantages.keys() - environments.keys():
            yield Problem(f"advantages.{label}", unknown_environment(label, environments))
        if self.uses_critic and not all(part.uses_critic for part in self._all):
            yield Problem(
                "advantages",
                "use a critic in some environments only, and a critic needs returns of all attempts. Choose advantages "
                "with a critic for all environments (`other` too), or for none.",
            )


class EpisodeConfig(EnvironmentConfig):
    """Base of the configs of environments that have `reset` and `step`, and give a reward for each step."""

    max_turns: Annotated[int, OnResume.BY_NAME] = Field(default=16, gt=0)
    """Largest number of turns of the model in one episode."""
    action: Annotated[str | None, FunctionSetting(), OnResume.BY_NAME] = None
    """A function that turns the model's text into an action: `module:function` or `file.py:function`. If it raises
    ValueError, the model gets the message."""
    observation: Annotated[str | None, FunctionSetting(), OnResume.BY_NAME] = None
    """A function that turns an observation into the text that the model gets."""
    step_timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=60.0, gt=0)
    """Seconds that a reset or a step may take. If it takes longer, the attempt fails."""
    history: Literal["exact", "retokenize"] = "exact"
    """How the prompt of a later turn is made, as in the environment `tools`."""
    tool_format: ToolFormatSetting = AutoFormatConfig()
    """How the model writes reasoning, which is not part of its action. There are no tools."""

    @property
    def reward_terms(self) -> Collection[str]:
        """Return no terms: all rewards are those of turns."""
        return ()

    @property
    def most_turns(self) -> int:
        return self.max_turns


class GymnasiumConfig(EpisodeConfig):
    """An environment with the methods of Gymnasium: a class of your own, or one that is registered there."""

    name: str = "gymnasium"
    path: Annotated[str | None, FunctionSetting(), OnResume.BY_NAME] = Field(default=None, pattern=FUNCTION_PATH)
    """The class, or a function that makes an environment: `module:Class` or `file.py:Class`. `reset(seed=...)` returns
    an observation, or one with `info`. `step(action)` returns (observation, reward, terminated, truncated, info)."""
    id: Annotated[str | None, OnResume.BY_NAME] = None
    """Name of an environment that is registered in Gymnasium, instead of `path`, such as `FrozenLake-v1`."""
    arguments: Annotated[dict[str, Any], OnResume.BY_NAME] = {}
    """Arguments of the class or of `gymnasium.make`."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if (self.path is None) == (self.id is None):
            given = "Neither is given" if self.path is None else "Both are given"
            yield Problem("path", f"or `id` is needed, not both. {given}. Set path: my_env.py:MyEnv, or id: NAME-v1.")
        for key in ("action", "observation"):
            value = getattr(self, key)
            if value is not None and ":" not in value:
                yield Problem(key, f"is '{value}', which names no function. Write {key}: my_env.py:{value}.")


class OpenEnvConfig(EpisodeConfig):
    """An environment on a server that speaks OpenEnv's protocol.

    `action` may also name the field of the action that gets the text; by default, the model writes JSON, or the text of
    the only required field. `observation` may also name a field; by default, the model gets the only text of an
    observation, or all of it as JSON.
    """

    name: str = "openenv"
    url: Annotated[str, OnResume.FREE] = Field(pattern=r"^(https?|wss?)://.+")
    """Address of the server, such as `http://127.0.0.1:8000`."""
    sessions: Annotated[int, OnResume.FREE] = Field(default=1, gt=0)
    """Largest number of sessions at a time. The server must allow as many (`max_concurrent_envs`, 1 by default)."""
    connect_timeout_s: Annotated[float, OnResume.FREE] = Field(default=60.0, ge=0)
    """Seconds for which attempts try to connect to a server that is not there, as while it starts again."""
