"""Kind `reward`: score a response.

`RewardTable` is the type of a setting that maps the names of reward terms to reward components. It has short forms:

rewards: exact_match                               one reward; its term is `exact_match`
rewards: my_module:my_function                     the reward `function`; its term is `my_function`
rewards: path/to/file.py:my_function               the same for a function in a file
rewards: {name: exact_match, ignore_case: true}    one reward with settings
rewards: {right: exact_match, short: my_module:f}  terms by name, each in one of these forms

A Python program may pass functions in place of their names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Protocol, cast, runtime_checkable

from pydantic import BeforeValidator, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from spurline.config.section import Component, ComponentConfig, expand_shorthand
from spurline_rl.functions import name_of


class RewardConfig(ComponentConfig):
    """Settings of a reward."""

    kind: ClassVar[str] = "reward"
    needs_reference: ClassVar[bool] = False
    """If true, a row without a reference raises an error before training."""

    @property
    def scored_by(self) -> str | None:
        """Return the role of the backend's model that gives this reward, or None if the component itself scores.

        The backend scores the attempts of a step when their batch is made. Until then, the component returns 0.
        """
        return None


@dataclass(frozen=True)
class Answer:
    """An answer to score.

    Attributes:
        prompt: The prompt's text as the model saw it.
        response: The generated text without special tokens; in a conversation the model's last turn.
        reference: The expected text, if the data has one.
        row: The dataset row.
        messages: The whole conversation with the model's turns, if the environment has one.
        metrics: A reward may add numbers here, such as its cost. The number NAME of the reward TERM is logged as
            `scoring/TERM/NAME`, its mean over a step's attempts.
    """

    prompt: str
    response: str
    reference: str | None
    row: Mapping[str, Any]
    messages: Sequence[Mapping[str, Any]] = ()
    metrics: dict[str, float] = field(default_factory=dict[str, float], compare=False)


class Reward(Protocol):
    """Score an answer.

    Factory: `Class(config)`. A reward that holds processes or files also has `close()`.
    """

    def score(self, answer: Answer) -> float | Awaitable[float]:
        """Return a finite number; larger is better.

        A plain method is called on several threads at the same time. An `async def` is awaited on the event loop of the
        rollouts, and must not block it.
        """
        ...


@runtime_checkable
class ScoresMany(Protocol):
    """A reward that also scores several answers together, which is faster for models and servers."""

    def score_many(self, answers: Sequence[Answer]) -> Sequence[float] | Awaitable[Sequence[float]]:
        """Return a score for each answer. It is called like `score`, with the answers that are finished by then."""
        ...


def _expand(value: Any) -> Any:
    """Return a table of rewards from each short form."""
    if callable(value):
        return {name_of(value): _expand_function(value)}
    one = expand_shorthand(value, "name")
    if not isinstance(one, Mapping):
        return value
    rewards = cast("Mapping[str, Any]", one)
    # If the value of `name` is not a text, `name` is the name of a reward term.
    if isinstance(rewards.get("name"), str):
        reward = _expand_function(value)
        return {_term(reward): reward}
    return {term: _expand_function(reward) for term, reward in rewards.items()}


def _expand_function(reward: Any) -> Any:
    """Turn `module:function` or `file.py:function` into settings of the reward `function`. Return others unchanged."""
    if callable(reward):
        return {"name": "function", "path": reward}
    settings = expand_shorthand(reward, "path")
    if settings is reward or ":" not in str(settings["path"]):
        return reward
    return {"name": "function", **settings}


def _term(reward: Any) -> str:
    """Return the term of a single reward, which is the name of its function or component."""
    settings = expand_shorthand(reward, "name")
    path = settings.get("path")
    if callable(path):
        return name_of(path)
    return str(settings.get("path" if settings["name"] == "function" else "name", "function")).rpartition(":")[2]


class _SchemaOfRewards:
    """Adds the short forms to the JSON schema: a string for a reward, and a string or one reward for the table."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        table = handler(core_schema)
        text = {"type": "string"}
        if "additionalProperties" not in table:
            return {"anyOf": [text, table]}
        reward = table["additionalProperties"]
        table["additionalProperties"] = {"anyOf": [text, reward]}
        return {"anyOf": [text, reward, table]}


RewardTable = Annotated[
    dict[str, Annotated[RewardConfig, Component("reward")]], BeforeValidator(_expand), _SchemaOfRewards()
]
"""Named reward terms, each a reward component."""
