"""Kind `optimizer`: change the weights by their gradients."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

from pydantic import Field

from spurline.config.section import ComponentConfig, OnResume, Section
from spurline.errors import Problem

if TYPE_CHECKING:
    from torch import Tensor


REGEX = "re:"
"""A pattern that begins with this is a regular expression."""


def pattern_problem(pattern: str) -> str | None:
    """Return the problem with a pattern of parameter names, as text that follows its key, or None if it is valid."""
    if not pattern.startswith(REGEX):
        return None
    try:
        re.compile(pattern.removeprefix(REGEX))
    except re.error as error:
        return f"is {pattern!r}, but the text after '{REGEX}' is not a regular expression: {error}."
    return None


class ParameterGroup(Section):
    """Settings of the parameters whose names fit a pattern."""

    match: str = Field(min_length=1)
    """Pattern of parameter names such as `model.layers.0.mlp.up_proj.weight`: a glob for the whole name, as in
    `*embed_tokens*`, or `re:` and a regular expression for a part of it, as in `re:layers\\.[01]\\.`."""
    learning_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Peak learning rate of the group. The default is the optimizer's."""
    learning_rate_scale: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Factor by which the optimizer's learning rate is multiplied, instead of `learning_rate`."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight decay of all parameters of the group, norms and biases included. By default, matrices of the group have
    the optimizer's weight decay."""

    def problems(self, run: Any) -> Iterable[Problem]:
        if self.learning_rate is not None and self.learning_rate_scale is not None:
            yield Problem("learning_rate", "and learning_rate_scale exclude each other. Remove one.")
        if self.learning_rate is None and self.learning_rate_scale is None and self.weight_decay is None:
            yield Problem("", "changes nothing. Give it learning_rate, learning_rate_scale or weight_decay.")
        problem = pattern_problem(self.match)
        if problem is not None:
            yield Problem("match", problem)


class OptimizerConfig(ComponentConfig):
    """Settings of an optimizer, and facts about it that a run needs before any weight is loaded."""

    kind: ClassVar[str] = "optimizer"
    needs_whole_parameters: ClassVar[str | None] = (
        "its config does not say `needs_whole_parameters = None`, which allows parameters as DTensors"
    )
    """Why the optimizer cannot step parameters that are divided between ranks, as text for messages, or None if it can.

    Such parameters are DTensors. An optimizer can step them if it uses torch operations that support DTensors, and
    either changes each value by that value's own gradient and state alone, or gathers the values that it needs."""

    is_elementwise: ClassVar[bool] = False
    """If True, a step changes each value by that value's own gradient and state alone, whatever the shape. The
    optimizer may then get any flat piece of a parameter. A subclass of such a config, for example of `AdamWConfig`,
    must set this to False if its steps are not elementwise. Otherwise training would be wrong, which
    `OptimizerContract` detects."""

    steps_apart: ClassVar[bool] = False
    """If True, one step may be made by several calls of `step`, each with the gradients of some parameters. Each
    parameter must then change by its own gradient and state alone, and no state may count calls. If False, backends
    that hold weights in half precision need memory for all of them in full precision during a step. Subclasses inherit
    this like `is_elementwise`, and `OptimizerContract` checks it."""

    learning_rate: Annotated[float, OnResume.BY_NAME] = Field(default=2e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate. At each step, `schedule` sets the share of the peak that is used."""
    weight_decay: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay of matrices. Biases, norms and other vectors have none."""
    max_grad_norm: Annotated[float | None, OnResume.BY_NAME] = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this. Null turns clipping off."""
    groups: Annotated[tuple[ParameterGroup, ...], OnResume.BY_NAME] = ()
    """Parameters with their own settings. A parameter belongs to the first group whose pattern fits its name."""

    def state_bytes(self, shapes: Mapping[str, Sequence[int]], weight_bytes: int) -> int:
        """Return the bytes of state that the optimizer keeps, for the memory estimate of `spurline plan`.

        By default, each parameter has two tensors of its shape and dtype, as with Adam.

        Args:
            shapes: Shape of each trained parameter, by name.
            weight_bytes: Bytes of one weight.
        """
        return 2 * weight_bytes * num_values(shapes)


def num_values(shapes: Mapping[str, Sequence[int]]) -> int:
    """Return the number of values in all parameters of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())


class Optimizer(Protocol):
    """Changes the weights by their gradients. Every `torch.optim.Optimizer` fits this protocol.

    Factory: `Class(config, named_parameters=Mapping[str, Parameter])`, or a function that returns an optimizer.
    `named_parameters` are the trained parameters by their Hugging Face names; with several ranks they may be DTensors.
    `parameter_groups(config, named_parameters)` of `spurline_models.optimizers.groups` makes torch's parameter groups
    from the settings that all optimizers share. In a new optimizer, the `lr` of a group is its peak learning rate.

    A checkpoint holds `state` by parameter name (tensors, numbers, texts and None, bit for bit, without pickle), and
    those settings of the parameter groups that have changed since the optimizer was made. Other state is refused when
    the first checkpoint is written.

    param_groups: parameters under `params`, and their settings. The run sets `lr` before each step, by the schedule.
    """

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """Return the state of each parameter, a dict with names that the optimizer chooses."""
        ...

    def step(self) -> object:
        """Change the weights by their gradients, which have been clipped. A parameter may lack a gradient."""
        ...
