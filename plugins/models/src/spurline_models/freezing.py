"""Leave parts of a model out of training, by patterns of parameter names (`model.freeze`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from spurline.errors import ConfigError
from spurline_models.optimizers.groups import name_matcher, names_near


def freeze_parameters(causal: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name fits a pattern. Raises ConfigError as `frozen_names` does."""
    parameters = dict(causal.named_parameters())
    for name in frozen_names(parameters, patterns):
        parameters[name].requires_grad_(False)


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names that fit a pattern.

    Raises:
        ConfigError: For a pattern that fits none, and if nothing is left to train.
    """
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
