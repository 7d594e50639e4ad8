"""Freeze parameters (`model.freeze`), and divide the others into torch's parameter groups, by name patterns."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn import Parameter

from spurline.errors import ConfigError, suggestion
from spurline.protocols.optimizer import REGEX, OptimizerConfig, ParameterGroup


def parameter_groups(config: OptimizerConfig, named_parameters: Mapping[str, Parameter]) -> list[dict[str, Any]]:
    """Return parameter groups for a torch optimizer: dicts with `params`, `lr` and `weight_decay`.

    `lr` is the peak learning rate. Unless a group sets it, vectors such as biases and norms have a `weight_decay` of 0.
    """
    found: dict[tuple[float, float], list[Parameter]] = {}
    for name, parameter in named_parameters.items():
        found.setdefault(settings_of(config, name, parameter), []).append(parameter)
    return [{"params": members, "lr": rate, "weight_decay": decay} for (rate, decay), members in found.items()]


def settings_of(config: OptimizerConfig, name: str, parameter: Parameter) -> tuple[float, float]:
    """Return the peak learning rate and weight decay of a parameter. The first group that fits may set them."""
    group = next((group for group in config.groups if name_matcher(group.match)(name)), None)
    decay = config.weight_decay if parameter.ndim >= 2 else 0.0
    if group is None:
        return config.learning_rate, decay
    return group_rate(config, group), decay if group.weight_decay is None else group.weight_decay


def group_rate(config: OptimizerConfig, group: ParameterGroup) -> float:
    if group.learning_rate is not None:
        return group.learning_rate
    return config.learning_rate * (1.0 if group.learning_rate_scale is None else group.learning_rate_scale)


def name_matcher(pattern: str) -> Callable[[str], bool]:
    """Return a function that tests names. A pattern is a glob for whole names, or a regular expression after `re:`."""
    if pattern.startswith(REGEX):
        expression = re.compile(pattern.removeprefix(REGEX))
        return lambda name: expression.search(name) is not None
    return lambda name: fnmatchcase(name, pattern)


def check_groups(config: OptimizerConfig, names: Iterable[str], key: str = "optimizer") -> None:
    """Raise ConfigError if the pattern of a group fits no trained parameter, or only parameters of earlier groups.

    `key` is the key path of the optimizer's settings in the config file.
    """
    names = list(names)
    left = names
    for number, group in enumerate(config.groups):
        fits = name_matcher(group.match)
        if not any(map(fits, left)):
            why = f"no trained parameter has such a name.{names_near(group.match, names)}"
            if any(map(fits, names)):
                why = "all parameters that it fits are in earlier groups. Move this group up."
            raise ConfigError.at(f"{key}.groups.{number}.match", f"is {group.match!r}, and {why}")
        left = [name for name in left if not fits(name)]


def names_near(pattern: str, names: list[str]) -> str:
    """Return sentences for an error message, with names that are similar to the pattern."""
    word = pattern.removeprefix(REGEX).strip("*^$").replace("\\", "")
    hint = suggestion(word, {part for name in names for part in (name, *name.split("."))})
    if any(word in name for name in names):
        hint = f" Globs must fit the whole name. Did you mean '*{word}*'?"
    shown = sorted(names, key=lambda name: (word.split(".")[0] not in name, len(name)))[:4]
    return f"{hint} There are {len(names)}, such as {', '.join(shown)}."


def freeze_parameters(causal: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names fit a pattern. Raises ConfigError if `frozen_names` does."""
    parameters = dict(causal.named_parameters())
    for name in frozen_names(parameters, patterns):
        parameters[name].requires_grad_(False)


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that fit a pattern. Raises ConfigError if a pattern fits none, or nothing is left to train."""
    frozen: set[str] = set()
    for number, pattern in enumerate(patterns):
        fits = name_matcher(pattern)
        found = set(filter(fits, names))
        if not found:
            raise ConfigError.at(
                f"model.freeze.{number}",
                f"is {pattern!r}, and no parameter has such a name. A tied weight has the name of the embedding."
                f"{names_near(pattern, list(names))}",
            )
        frozen |= found
    if len(frozen) == len(names):
        raise ConfigError.at("model.freeze", "leaves nothing to train. Remove a pattern.")
    return frozen
