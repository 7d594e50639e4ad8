"""Kind `optimizer`: gradients become new weights."""

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
"""A `match` that begins with this is a regular expression."""


def pattern_problem(pattern: str) -> str | None:
    """Return the problem with a pattern of parameter names, in words that follow its key; None if there is none."""
    if not pattern.startswith(REGEX):
        return None
    try:
        re.compile(pattern.removeprefix(REGEX))
    except re.error as error:
        return f"is {pattern!r}, and the text after '{REGEX}' is not a regular expression: {error}."
    return None


class ParameterGroup(Section):
    """Settings of the parameters whose names fit a pattern."""

    match: str = Field(min_length=1)
    """Pattern of parameter names such as `model.layers.0.mlp.up_proj.weight`: a glob over the whole name, as in
    `*embed_tokens*`, or `re:` and a regular expression found anywhere in it, as in `re:layers\\.[01]\\.`."""
    learning_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Peak learning rate of the group; default is the optimizer's."""
    learning_rate_scale: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Factor of the optimizer's learning rate, instead of `learning_rate`."""
    weight_decay: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Weight decay of all parameters of the group, norms and biases too; default is the optimizer's, for matrices."""

    def problems(self, run: Any) -> Iterable[Problem]:
        if self.learning_rate is not None and self.learning_rate_scale is not None:
            yield Problem("learning_rate", "and learning_rate_scale exclude each other. Remove one.")
        if self.learning_rate is None and self.learning_rate_scale is None and self.weight_decay is None:
            yield Problem("", "changes nothing. Give it learning_rate, learning_rate_scale or weight_decay.")
        problem = pattern_problem(self.match)
        if problem is not None:
            yield Problem("match", problem)


class OptimizerConfig(ComponentConfig):
    """Settings of an optimizer, and what a run must know of it before any weight is loaded."""

    kind: ClassVar[str] = "optimizer"
    needs_whole_parameters: ClassVar[str | None] = (
        "its config does not set `needs_whole_parameters = None`, as that of an optimizer does that takes DTensors"
    )
    """A clause that says why the optimizer cannot step parameters that are divided between ranks; None if it can.

    Such parameters are DTensors. An optimizer can step them if it uses torch operations that support DTensors, and
    either changes each value by that value's own gradient and state, or gathers what it needs."""

    is_elementwise: ClassVar[bool] = False
    """If True, steps change each value by that value's own gradient and state alone, whatever the shape, so that the
    optimizer may be given any flat piece of a parameter. A subclass of a config that sets this, such as `AdamWConfig`,
    must set it to False if its steps differ; otherwise training would be wrong, which `OptimizerContract` detects."""

    steps_apart: ClassVar[bool] = False
    """If True, one step may be taken by several calls of `step`, each with the gradients of some parameters: a
    parameter changes by its own gradient and state alone, and no state counts calls. If False, backends that hold
    weights in half precision need memory for all of them in full precision during a step. Subclasses inherit this like
    `is_elementwise`, and `OptimizerContract` checks it."""

    learning_rate: Annotated[float, OnResume.BY_NAME] = Field(default=2e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate; `schedule` says how much of it each step gets."""
    weight_decay: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight decay for matrices; biases, norms and other vectors get none."""
    max_grad_norm: Annotated[float | None, OnResume.BY_NAME] = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; null turns clipping off."""
    groups: Annotated[tuple[ParameterGroup, ...], OnResume.BY_NAME] = ()
    """Parameters with settings of their own, by pattern; the first that fits a name counts."""

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
    """Turn gradients into new weights; every `torch.optim.Optimizer` does.

    Factory: `Class(config, named_parameters=Mapping[str, Parameter])`; a function that returns an optimizer will do.
    `named_parameters` are those that are trained, by their Hugging Face names; with several ranks they may be DTensors.
    `parameter_groups(config, named_parameters)` of `spurline_models.optimizers.groups` makes torch's parameter groups
    out of the settings that all optimizers share. `lr` of a new optimizer's groups is their peak.

    A checkpoint holds `state` by parameter name (tensors, numbers, texts and None, bit for bit, without pickle), and
    those values of the parameter groups that changed since the optimizer was made. Other state is refused when the
    first checkpoint is written.

    param_groups: parameters under `params`, and their settings. The run sets `lr` before each step, as `schedule` says.
    """

    param_groups: list[dict[str, Any]]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:
        """Return the state of each parameter: a dict by names of the optimizer's own."""
        ...

    def step(self) -> object:
        """Change the weights by their gradients, which have been clipped. A parameter may have none."""
        ...
