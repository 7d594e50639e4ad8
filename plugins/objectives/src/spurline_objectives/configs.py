"""Settings of the losses, the correction and the advantages. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline_rl.advantages.configs import GroupAdvantageConfig, GrpoConfig
from spurline_rl.configs import CUT_OFF, OVERLONG
from spurline_rl.evaluation_configs import unknown_term
from spurline_rl.losses.configs import PolicyLossConfig, PpoConfig
from spurline_rl.protocols.correction import CorrectionConfig

_USUAL_THRESHOLDS = {"tv": 0.2, "kl": 0.05}


class DppoConfig(PolicyLossConfig):
    """A trust region by divergence in place of a clipped ratio (DPPO, Qi et al. 2026, arXiv:2602.04879)."""

    name: str = "dppo"
    divergence: Annotated[Literal["tv", "kl"], OnResume.BY_NAME] = "tv"
    """The divergence between two distributions over two events, this token and any other token: total variation, or the
    KL divergence in nats."""
    threshold_low: Annotated[float | None, OnResume.BY_NAME] = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest divergence of a token whose probability falls; null is 0.2 for `tv`, and 0.05 for `kl`."""
    threshold_high: Annotated[float | None, OnResume.BY_NAME] = Field(default=None, gt=0, allow_inf_nan=False)
    """Largest divergence of a token whose probability rises; null is 0.2 for `tv`, and 0.05 for `kl`."""
    max_ratio: Annotated[float, OnResume.BY_NAME] = Field(default=20.0, gt=1, allow_inf_nan=False)
    """Largest importance weight of a token."""
    anchor: Annotated[Literal["rollout", "old"], OnResume.BY_NAME] = "rollout"
    """The policy around which the trust region lies. `rollout` is the engine's policy, as in the paper. `old` is the
    trainer's policy before the update, to be used with a `correction`."""

    @property
    def uses_rollout_logprobs(self) -> bool:
        return self.anchor == "rollout"

    @property
    def thresholds(self) -> tuple[float, float]:
        """Return the thresholds for falling and for rising probabilities."""
        usual = _USUAL_THRESHOLDS[self.divergence]
        return self.threshold_low or usual, self.threshold_high or usual

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if self.anchor == "rollout" and "correction_factors" in run.source.facts.columns:
            yield Problem(
                "anchor",
                "is rollout, so the loss weighs tokens by their ratio to the engine, and source.correction would do so "
                "a second time. Remove source.correction, or set loss.anchor: old.",
            )


class PpoPerRowConfig(PolicyLossConfig):
    """The clipped ratio of `ppo` with clip bounds from the data, such as other bounds for each environment.

    The columns must be in `source.carry`, and each row of the data needs both numbers.
    """

    name: str = "ppo_per_row"
    clip_low_column: Annotated[str, OnResume.BY_NAME] = "clip_low"
    """Column with `clip_low` of `ppo`: the lowest ratio is 1 minus this number."""
    clip_high_column: Annotated[str, OnResume.BY_NAME] = "clip_high"
    """Column with `clip_high` of `ppo`: the highest ratio is 1 plus this number."""


class EntropyTargetConfig(PpoConfig):
    """The loss `ppo` with an entropy bonus only in steps whose entropy is below a target (Skywork-OR1, He et al. 2025,
    arXiv:2505.22312)."""

    name: str = "ppo_entropy_target"
    entropy_coefficient: Annotated[float, OnResume.BY_NAME] = Field(default=0.005, gt=0, allow_inf_nan=False)
    """Weight of the bonus for the entropy of the next-token distribution in steps below the target."""
    entropy_target: Annotated[float, OnResume.BY_NAME] = Field(default=0.2, gt=0, allow_inf_nan=False)
    """Entropy in nats per token below which a step has the bonus."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        sampling = run.source.facts.sampling
        if sampling is not None and sampling.top_k:
            yield Problem(
                "name",
                f"is {self.name}, which measures entropy by the probabilities of the sampled tokens, and "
                f"source.sampling.top_k: {sampling.top_k} leaves out tokens that the bonus counts. Set top_k: 0 and "
                "top_p: 1, or choose another loss.",
            )


class KpopConfig(CorrectionConfig):
    """Importance weights if the divergence from the engine is small in both directions, else 0 (KPop, Guo et al. 2026,
    "Taming Training-Inference Mismatch in Reinforcement Learning with Adaptive Masking Regions")."""

    name: str = "kpop"
    threshold: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Largest KL divergence in nats between distributions over two events, this token and any other token."""


TURNS = "turns"
"""Name of the rewards of single turns among the weights of `gdpo`."""


class GdpoConfig(GroupAdvantageConfig):
    """The sum of reward terms, each normalised over the prompt's samples (GDPO, Liu et al. 2026, arXiv:2601.05242)."""

    compares_returns: ClassVar[bool] = False

    name: str = "gdpo"
    weights: Annotated[dict[str, float], OnResume.BY_NAME] = {}
    """Weight of each normalised term; the default is 1. `turns` is that of rewards of single turns. They take the place
    of `source.reward_weights`, which would be lost when a term is normalised."""
    normalize_batch: Annotated[bool, OnResume.BY_NAME] = True
    """Divide by the standard deviation over all samples, so that more terms do not mean larger steps."""
    eps: Annotated[float, OnResume.BY_NAME] = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to standard deviations."""

    @property
    def divides_by_spread(self) -> bool:
        return True

    @property
    def weighs_terms(self) -> bool:
        return True

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        known = run.source.facts.reward_terms
        terms = {*(self.weights if known is None else known), OVERLONG, CUT_OFF, TURNS}
        for name in sorted(self.weights.keys() - terms):
            yield Problem(f"weights.{name}", unknown_term(name, terms))


class TurnGrpoConfig(GrpoConfig):
    """The return from a turn on, compared with the same turn of other samples (Zeng et al. 2025, arXiv:2505.11821)."""

    compares_returns: ClassVar[bool] = False

    name: str = "turn_grpo"
    gamma: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0, le=1)
    """Discount per turn."""
