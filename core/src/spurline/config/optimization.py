"""The sections that say how weights are updated: optimizer, schedule, and the critic with its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field, model_validator

from spurline.config.loss_config import trains_on
from spurline.config.named_section import NamedSection
from spurline.config.section import Component, ComponentConfig, Section
from spurline.errors import Problem

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and gradient clipping."""

    learning_rate: float = Field(default=2e-5, ge=0, allow_inf_nan=False)
    """Peak learning rate."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of the first and second moment estimates."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled weight decay for matrices; biases, norms and other vectors get none."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; null turns clipping off."""


class ScheduleConfig(NamedSection):
    """Learning rate as a function of the optimizer step; a bare string is short for its `name`."""

    name: Literal["constant", "linear", "cosine"] = "cosine"
    """Shape after warm-up."""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Optimizer steps of linear warm-up from zero."""
    warmup_ratio: float = Field(default=0.0, ge=0, le=1)
    """Warm-up as a share of all optimizer steps; used when `warmup_steps` is not given."""
    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate that the decay ends at, one step after the last, as a share of the peak (linear and cosine)."""


class CriticConfig(Section):
    """A second model of the run's architecture, with a value head, trained on the returns of rollouts.

    `critic: {}` takes all defaults. Its weights start as the policy's do; the learning rate is constant after warm-up.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_names(cls, value: Any) -> Any:
        """The defaults of these kinds are the policy's: a critic has its own."""
        if not isinstance(value, Mapping):
            return value
        completed = dict(cast("Mapping[str, Any]", value))
        for setting, name in (("loss", "value"), ("minibatches", "by_prompt")):
            given = completed.setdefault(setting, {})
            if isinstance(given, Mapping) and "name" not in given:
                completed[setting] = {"name": name, **cast("Mapping[str, Any]", given)}
        return completed

    loss: Annotated[ComponentConfig, Component("loss")]
    """Error of its values, reduced to the mean over tokens; default is `value`."""
    minibatches: Annotated[ComponentConfig, Component("minibatches")]
    """How a batch is cut into the critic's optimizer steps; default is `by_prompt`, with a size of its own."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1e-5)
    """AdamW settings."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps of the critic in which the learning rate rises from zero."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        advantage = getattr(run.source, "advantage", None)
        if not getattr(advantage, "uses_critic", False):
            what = f"the advantage '{advantage.name}'" if advantage is not None else f"the source '{run.source.name}'"
            yield Problem("", f"would be trained for nothing: {what} uses no critic. Remove it, or choose gae.")
        if trains_on(self.loss) != "returns":
            yield Problem(
                "loss",
                f"is {self.loss.name}, which is no error of values: it would read the critic's values as logprobs. Set "
                'loss: value, or remove the line. A loss of your own says `trains_on = "returns"` in its config.',
            )
