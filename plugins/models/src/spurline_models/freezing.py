"""Leave parts of a model out of training, by patterns of parameter names (`model.freeze`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import nn

from spurline.errors import ConfigError
from spurline_models.optimizers.groups import name_matcher, names_near


def freeze_parameters(causal: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter whose name fits a pattern. Raises ConfigError as `frozen_names` does."""
    if not patterns:
        return
    parameters = dict(causal.named_parameters())
    tied = [name for name, _ in causal.named_parameters(remove_duplicate=False) if name not in parameters]
    for name in frozen_names(parameters, patterns, tied):
        parameters[name].requires_grad_(False)


def frozen_names(names: Collection[str], patterns: Sequence[str], tied: Collection[str] = ()) -> set[str]:
    """Return the names that fit a pattern; `tied` are further names of some of the parameters.

    Raises:
        ConfigError: For a pattern that fits none, and if nothing is left to train.
    """
    frozen: set[str] = set()
    for number, pattern in enumerate(patterns):
        fits = name_matcher(pattern)
        found = set(filter(fits, names))
        if not found:
            why = f"no parameter has such a name.{names_near(pattern, list(names))}"
            if second := next(filter(fits, tied), None):
                why = f"{second} is another name of a tied weight. Freeze its first name, such as the embedding's."
            raise ConfigError.at(f"model.freeze.{number}", f"is {pattern!r}, and {why}")
        frozen |= found
    if len(frozen) == len(names):
        raise ConfigError.at("model.freeze", "leaves nothing to train. Remove a pattern.")
    return frozen
