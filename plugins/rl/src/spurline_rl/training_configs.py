"""Settings of the critic, of mini-batches and of orders that follow success. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, cast

from pydantic import Field, model_validator

from spurline.config.run_config import CriticConfig, RunConfig
from spurline.config.section import Component, OnResume
from spurline.errors import ConfigError, Problem
from spurline.protocols.loss import LossConfig
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.protocols.optimizer import OptimizerConfig
from spurline_rl.evaluation_configs import terms_by_environment, unknown_term
from spurline_rl.protocols.adaptive_order import AdaptiveOrderConfig, ScoredDraw


class ByPromptConfig(MiniBatchesConfig):
    """Cut a batch of rollouts into optimizer steps. All attempts at a prompt are in the same step."""

    name: str = "by_prompt"
    prompts_per_minibatch: Annotated[int | None, OnResume.BY_NAME] = Field(default=None, gt=0)
    """Prompts in one optimizer step. If null, a step uses all prompts of the batch."""
    update_epochs: Annotated[int, OnResume.BY_NAME] = Field(default=1, gt=0)
    """Passes over the batch."""

    def minibatch_prompts(self, prompts_per_step: int) -> int:
        return self.prompts_per_minibatch or prompts_per_step

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        num_prompts = run.source.facts.num_prompts
        if num_prompts is None:
            yield Problem(
                "name",
                f"is by_prompt, but the source '{run.source.name}' has no prompts. Choose a source of rollouts, or "
                "minibatches: whole.",
            )
        elif self.prompts_per_minibatch is not None and num_prompts % self.prompts_per_minibatch:
            yield Problem(
                "prompts_per_minibatch",
                f"is {self.prompts_per_minibatch}, which does not divide source.prompts_per_step: "
                f"{num_prompts}. Choose a divisor.",
            )


class SuccessOrderConfig(AdaptiveOrderConfig):
    """Base settings of an order that measures the success of a prompt by the mean reward of its attempts."""

    reward: str | None = None
    """Reward term that measures success. If null, the weighted sum of all terms measures it."""
    failed: float = Field(default=0.0, allow_inf_nan=False)
    """Mean reward of a prompt whose attempts all fail."""
    solved: float = Field(default=1.0, allow_inf_nan=False)
    """Mean reward of a prompt whose attempts all succeed."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Weight of a prompt or part whose attempts all succeed or all fail, relative to one whose attempts succeed half of
    the time."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if self.solved <= self.failed:
            yield Problem(
                "solved",
                f"is {self.solved:g}, which is not above failed: {self.failed:g}. Set it to the mean reward of a "
                "prompt whose attempts all succeed.",
            )
        for terms in terms_by_environment(run.source).values():
            if self.reward is not None and terms is not None and self.reward not in terms:
                yield Problem("reward", unknown_term(self.reward, terms))

    def success_of(self, draw: ScoredDraw) -> float:
        """Return the success of a drawn prompt, from 0 to 1. Raises ConfigError if it has no reward of this name."""
        if self.reward is not None and not draw.terms.get(self.reward):
            raise ConfigError.at("data.order.reward", unknown_term(self.reward, draw.terms))
        rewards = draw.returns if self.reward is None else draw.terms[self.reward]
        success = (sum(rewards) / len(rewards) - self.failed) / (self.solved - self.failed)
        return min(max(success, 0.0), 1.0)


class RewardAdaptiveOrderConfig(SuccessOrderConfig):
    """Draw a prompt more often if some attempts solve it and others do not.

    The weight of a prompt with mean reward p grows with p (1 - p), the variance of its success (sampling for
    learnability, Foster et al. 2025, arXiv:2502.12272). Prompts without attempts have the largest weight. A step
    never draws a prompt twice. An epoch has as many draws as there are prompts.
    """

    name: str = "reward_adaptive"


class RolloutCriticConfig(CriticConfig):
    """A second model with the policy's architecture and a value head, trained on the returns of rollouts.

    `critic: {}` uses all defaults. The critic starts from the policy's weights. Its learning rate is constant after
    warm-up.
    """

    @model_validator(mode="before")
    @classmethod
    def _with_names(cls, value: Any) -> Any:
        """Set the critic's defaults, which differ from the policy's."""
        if not isinstance(value, Mapping):
            return value
        completed = dict(cast("Mapping[str, Any]", value))
        for setting, name in (("loss", "value"), ("minibatches", "by_prompt")):
            given = completed.setdefault(setting, {})
            if isinstance(given, Mapping) and "name" not in given:
                completed[setting] = {"name": name, **cast("Mapping[str, Any]", given)}
        completed.setdefault("optimizer", {"learning_rate": 1e-5})
        return completed

    loss: Annotated[LossConfig, Component("loss")]
    """Loss of the critic's values, averaged over tokens. The default is `value`."""
    minibatches: Annotated[MiniBatchesConfig, Component("minibatches")]
    """How a batch is cut into the critic's optimizer steps. The default is `by_prompt`."""
    optimizer: Annotated[OptimizerConfig, Component("optimizer")]
    """The critic's optimizer. The default has a peak learning rate of 1e-5."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        idle = run.source.facts.without_critic
        if idle is not None:
            yield Problem("", f"has no effect: {idle} uses no critic. Remove it, or choose gae.")
        if self.loss.trains_on != "returns":
            yield Problem(
                "loss",
                f"is {self.loss.name}, which does not train values. Set loss: value, or remove the line. The config of "
                'your own loss must have `trains_on = "returns"`.',
            )
