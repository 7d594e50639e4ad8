"""Environment `gymnasium`: classes with `reset` and `step` as in Gymnasium, of that library or plain ones.

Each attempt has its own object. Its methods run on threads, so an environment that hangs costs its attempt alone.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.errors import PluginError
from spurline.plugins.registry import Registry
from spurline_concurrency.calls import located, within
from spurline_environments.configs import GymnasiumConfig
from spurline_environments.episodes import InvalidActionError, Step, converted, function_setting, number_of, play
from spurline_environments.tool_formats import Turns
from spurline_rl.functions import load_function
from spurline_rl.protocols.environment import PolicyHandle, Task
from spurline_rl.trajectory import Trajectory

_RESULTS_OF_STEP = 5


class GymnasiumEnvironment:
    """Plays episodes of a class, or of an environment that is registered in Gymnasium."""

    def __init__(
        self, config: GymnasiumConfig, registry: Registry, tokenizer: PreTrainedTokenizerBase, data: DataConfig
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._turns = Turns(config.tool_format, registry, tokenizer, has_tools=False)
        self._make = _maker(config)
        self._to_action = function_setting(config.action, "action")
        self._to_text = function_setting(config.observation, "observation")

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        name, limit = self._config.path or self._config.id, self._config.step_timeout_s
        environment = await within(limit, f"making {name}", self._make)
        episode = _Episode(environment, str(name), limit, self._to_action, self._to_text)
        trajectory = await play(episode, self._config, self._turns, task, policy, self._tokenizer)
        # The environment of a failed attempt is not closed, since a thread may still use it.
        if hasattr(environment, "close"):
            try:
                await episode.call(environment.close)
            except Exception as error:  # noqa: BLE001 - the episode is complete
                warnings.warn(f"{name} was not closed: {located(error)}", stacklevel=1)
        return trajectory


def _maker(config: GymnasiumConfig) -> Callable[[], Any]:
    if config.path is not None:
        return partial(load_function(config.path, "environment"), **config.arguments)
    assert config.id is not None, "the config's check asks for a path or an id"
    try:
        import gymnasium  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError as error:
        raise PluginError(
            f'environment.id: {config.id} needs Gymnasium. Install it with pip install "spurline-environments'
            '[gymnasium]", or set `path` to a class of your own.'
        ) from error
    return partial(gymnasium.make, config.id, **config.arguments)


class _Episode:
    """An episode of an object that has `reset` and `step`."""

    def __init__(
        self,
        environment: Any,
        name: str,
        timeout_s: float,
        to_action: Callable[[str], Any] | None,
        to_text: Callable[[Any], Any] | None,
    ) -> None:
        self._environment = environment
        self._name = name
        self._timeout_s = timeout_s
        self._to_action = to_action or partial(_default_action, getattr(environment, "action_space", None), name)
        self._to_text = to_text or str

    async def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        parameters = inspect.signature(self._environment.reset).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        given = {"seed": seed, "options": dict(row)}
        accepted = {name: value for name, value in given.items() if takes_any or name in parameters}
        found = await self.call(self._environment.reset, **accepted)
        has_info = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], Mapping)
        return Step(str(await self.call(self._to_text, found[0] if has_info else found)))

    async def step(self, text: str) -> Step:
        action = await converted(self.call(self._to_action, text))
        found = await self.call(self._environment.step, action)
        if not isinstance(found, tuple) or len(found) != _RESULTS_OF_STEP:
            raise PluginError(
                f"{self._name}: `step` returned {found!r:.200}. It must return (observation, reward, terminated, "
                "truncated, info)."
            )
        observation, reward, terminated, truncated, _ = found
        ended = "terminated" if terminated else "truncated" if truncated else ""
        return Step(str(await self.call(self._to_text, observation)), number_of(reward, self._name), ended)

    async def call(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function of the user on a thread, with a time limit."""
        what = f"`{getattr(function, '__name__', 'step')}` of {self._name}"
        return await within(self._timeout_s, what, function, *arguments, **keywords)


def _default_action(space: Any, name: str, text: str) -> Any:
    """Return the text itself, or the number of a discrete action."""
    kind = type(space).__name__
    if space is None or kind == "Text":
        return text
    if kind != "Discrete":
        raise PluginError(
            f"{name} has the action space {space}, and an answer is text. Set `action` to a function that turns the "
            "text into an action: my_env.py:to_action."
        )
    try:
        action = int(text)
    except ValueError:
        action = None
    if action is None or not space.contains(action):
        first = int(space.start)
        raise InvalidActionError(f"write one number from {first} to {first + int(space.n) - 1}.")
    return action
