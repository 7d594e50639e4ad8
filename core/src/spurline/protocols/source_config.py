"""What the config of every source that trains on rollouts says. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.section import Component, ComponentConfig, OnResume, Section
from spurline.errors import Problem

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class SamplingConfig(Section):
    """How rollouts are sampled."""

    temperature: float = Field(default=1.0, gt=0, le=10)
    """The trainer divides its logits by the same number, so that its logprobs are those of the sampled distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the likeliest tokens that hold this much probability; needs `allow_truncated`."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this many likeliest tokens, 0 for all; needs `allow_truncated`."""
    allow_truncated: bool = False
    """Train although top_p or top_k cut tokens off, which the trainer's logprobs do not know of."""
    max_new_tokens: int = Field(default=1024, gt=0)
    """Longest response of one turn."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the model's own end tokens."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        for name, off in (("top_p", 1.0), ("top_k", 0)):
            if getattr(self, name) != off and not self.allow_truncated:
                yield Problem(
                    name,
                    "cuts tokens off while sampling, but the trainer's logprobs are those of the whole distribution, "
                    f"so importance ratios would be wrong. Set {name}: {off}, or allow_truncated: true to accept that.",
                )


class OverlongConfig(Section):
    """Soft punishment of responses that come close to the limit (DAPO, Yu et al. 2025, arXiv:2503.14476)."""

    buffer_tokens: int = Field(gt=0)
    """Length of the zone before max_new_tokens in which the penalty grows from 0 to 1."""
    penalty: float = Field(default=1.0, gt=0)
    """Reward taken away from a response of max_new_tokens."""


class KlInRewardConfig(Section):
    """A penalty per token for leaving the reference model, taken from the reward before advantages."""

    coefficient: float = Field(gt=0)
    """Weight of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the divergence (Schulman 2020)."""


class HeldOutConfig(Section):
    """Rollouts of held-out prompts, `data.eval`."""

    samples_per_prompt: int = Field(default=1, gt=0)
    """Attempts at each prompt; with k of them `eval/pass@k` is logged too."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """0 is greedy."""
    max_prompts: int | None = Field(default=200, gt=0)
    """Use the first prompts of the held-out data; null uses all."""
    success_reward: float = Field(default=1.0, allow_inf_nan=False)
    """An attempt whose return, the weighted sum of its rewards, reaches this counts as a pass."""


class FaultsConfig(Section):
    """What happens when an environment or reward fails."""

    retries: int = Field(default=2, ge=0)
    """Further attempts at a rollout that failed or ran out of time."""
    attempt_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds one attempt may take."""
    max_quarantined: int = Field(default=16, ge=0)
    """Groups that may be given up in the whole run before it stops."""


class PromptSourceConfig(ComponentConfig):
    """Base of the configs of sources that train on rollouts."""

    run_defaults: ClassVar[Mapping[str, str]] = {"collator": "rollouts", "minibatches": "by_prompt", "loss": "ppo"}

    prompts_per_step: int = Field(default=32, gt=0)
    """Prompts whose rollouts make up the batch of one step."""
    samples_per_prompt: int = Field(default=8, gt=0)
    """Rollouts of each prompt: its group."""
    environment: Annotated[ComponentConfig, Component("environment")]
    """How a prompt becomes a rewarded trajectory."""
    engine: Annotated[ComponentConfig, Component("rollout_engine")]
    """What generates."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    reward_weights: dict[str, float] = {}
    """Weight of each reward term; 1 where none is given."""
    advantage: Annotated[ComponentConfig, Component("advantage")]
    """How rewards become advantages."""
    advantage_scope: Literal["batch", "minibatch"] = "batch"
    """What an advantage that normalises over more than a group normalises over."""
    correction: Annotated[ComponentConfig, Component("correction")] | None = None
    """Weights against a mismatch between the distributions that sampled and that train; null for none."""
    turns: Literal["separate", "merged"] = "separate"
    """A training row per turn (step-wise training), or one row for all turns of an attempt in which each goes on from
    the tokens of the last; others keep a row per turn."""
    zero_variance: Literal["keep", "refill"] = "keep"
    """Groups whose rewards are all equal have no gradient: train on them, or draw further prompts in their place
    (dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476)."""
    max_draws_per_step: int | None = Field(default=None, gt=0)
    """With `refill`: prompts that one step may draw; null is 8 x prompts_per_step."""
    overlong: OverlongConfig | None = None
    """Take reward from responses that come close to the limit."""
    kl_in_reward: KlInRewardConfig | None = None
    """Take reward from tokens that leave the reference model."""
    faults: FaultsConfig = FaultsConfig()
    """Retries and limits."""
    held_out: HeldOutConfig = HeldOutConfig()
    """Evaluation."""
    max_concurrent: Annotated[int, OnResume.FREE] = Field(default=1024, gt=0)
    """Attempts under way at the same time."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from self._run_problems(run)
        if self.zero_variance == "refill" and self.samples_per_prompt < 2:
            yield Problem(
                "zero_variance",
                "is refill, but the reward of a single sample never varies, so every prompt would be left out. Raise "
                "samples_per_prompt, or set zero_variance: keep.",
            )
        overlong = self.overlong
        if overlong is not None and overlong.buffer_tokens > self.sampling.max_new_tokens:
            yield Problem(
                "overlong.buffer_tokens",
                f"is {overlong.buffer_tokens}, more than sampling.max_new_tokens: {self.sampling.max_new_tokens}, so "
                "that even an empty response would be punished. Choose a smaller zone.",
            )
        if self.zero_variance == "keep" and self.max_draws_per_step is not None:
            yield Problem("max_draws_per_step", "has no effect with zero_variance: keep. Set refill, or remove it.")
        if self.draw_limit < self.prompts_per_step:
            yield Problem(
                "max_draws_per_step",
                f"is {self.max_draws_per_step}, fewer than prompts_per_step: {self.prompts_per_step}. Raise it.",
            )

    def _run_problems(self, run: RunConfig) -> Iterable[Problem]:
        """Settings of other sections that mean nothing here; said under `name`, which is what makes them so."""
        for setting, instead in (
            ("batch_size", "source.prompts_per_step and source.samples_per_prompt say how large a batch is"),
            ("prefetch", "a batch of rollouts depends on the weights of the step before and cannot be built ahead"),
        ):
            if setting in run.model_fields_set:
                yield Problem("name", f"is {self.name}, with which '{setting}' has no meaning: {instead}. Remove it.")
        if run.evaluation.generate is not None:
            yield Problem(
                "name",
                f"is {self.name}, which evaluates with rollouts of its own. Remove evaluation.generate and set "
                "source.held_out.",
            )
        if run.collator.name.removeprefix("core/") in ("packed", "padded"):
            yield Problem(
                "name",
                f"is {self.name}, which needs one turn per row so that batches can be cut between prompts, but the "
                f"collator is {run.collator.name}. Set collator: rollouts, or remove the line.",
            )

    @property
    def draw_limit(self) -> int:
        """Prompts that one step may draw."""
        return self.max_draws_per_step or 8 * self.prompts_per_step
