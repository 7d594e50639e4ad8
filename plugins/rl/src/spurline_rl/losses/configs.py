"""Settings of the losses, and of the corrections for a mismatch with the engine. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume, Section
from spurline.errors import Problem
from spurline.protocols.loss import LossConfig, TrainsOn
from spurline_rl.protocols.correction import CorrectionConfig

Level = Literal["token", "sequence", "geometric"]
"""The ratio that a correction checks: the ratio of a token, or the product or geometric mean of a sequence's ratios."""


class KlConfig(Section):
    """Penalty for the divergence from the reference model, which is the model before training."""

    coefficient: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the penalty; with 0 no reference model is loaded."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL divergence per token. GRPO uses `k3`. `k2` has the gradient of the true KL. The gradient of
    `k1` is zero on average, so `k1` has no effect in a loss."""


class PolicyLossConfig(LossConfig):
    """Base of policy losses: a surrogate, plus a KL penalty, minus an entropy bonus."""

    trains_on: ClassVar[TrainsOn] = "advantages"
    missing_settings: ClassVar[Mapping[str, str]] = {
        "beta": "The weight of the KL penalty is kl: {coefficient: ...}; `beta` is a setting of dpo."
    }

    kl: Annotated[KlConfig, OnResume.BY_NAME] = KlConfig()
    """KL penalty in the loss."""
    entropy_coefficient: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the bonus for the entropy of the next-token distribution."""
    entropy_metric: Annotated[bool, OnResume.FREE] = True
    """Report `policy/entropy` even without a bonus. This costs a second pass over the logits."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"reference"} if self.kl.coefficient > 0 else ())


class PolicyGradientConfig(PolicyLossConfig):
    """-A log p, the plain policy gradient (REINFORCE, Williams 1992)."""

    name: str = "policy_gradient"
    importance_ratio: Annotated[bool, OnResume.BY_NAME] = False
    """Weight tokens by the unclipped ratio to the policy before the update, for batches of several optimizer steps."""


class PpoConfig(PolicyLossConfig):
    """Clipped probability ratio per token (PPO, Schulman et al. 2017, arXiv:1707.06347)."""

    name: str = "ppo"
    clip_low: Annotated[float, OnResume.BY_NAME] = Field(default=0.2, gt=0, lt=1)
    """Lowest ratio is 1 - clip_low."""
    clip_high: Annotated[float, OnResume.BY_NAME] = Field(default=0.2, gt=0, allow_inf_nan=False)
    """Highest ratio is 1 + clip_high; 0.28 is the clip-higher of DAPO (Yu et al. 2025, arXiv:2503.14476)."""
    dual_clip: Annotated[float | None, OnResume.BY_NAME] = Field(default=None, gt=1, allow_inf_nan=False)
    """Largest ratio in the loss of tokens with negative advantage, usually 3; null for no limit (Ye et al. 2020,
    arXiv:1912.09729)."""


class GspoConfig(PolicyLossConfig):
    """Clipped ratio per sequence (GSPO, Zheng et al. 2025, arXiv:2507.18071); meant for `reduction: sequence_mean`."""

    name: str = "gspo"
    clip_low: Annotated[float, OnResume.BY_NAME] = Field(default=3e-4, gt=0, lt=1)
    """Lowest sequence ratio is 1 - clip_low."""
    clip_high: Annotated[float, OnResume.BY_NAME] = Field(default=4e-4, gt=0, allow_inf_nan=False)
    """Highest sequence ratio is 1 + clip_high."""


class CispoConfig(PolicyLossConfig):
    """Policy gradient weighted by a clipped, constant ratio (CISPO, MiniMax 2025, arXiv:2506.13585)."""

    name: str = "cispo"
    clip_low: Annotated[float | None, OnResume.BY_NAME] = Field(default=None, gt=0, lt=1)
    """Lowest weight is 1 - clip_low; null sets no lower bound, as the paper does."""
    clip_high: Annotated[float, OnResume.BY_NAME] = Field(default=4.0, gt=0, allow_inf_nan=False)
    """Highest weight is 1 + clip_high. In ScaleRL, several weights, including 5, worked alike (arXiv:2510.13786)."""


class SapoConfig(PolicyLossConfig):
    """A soft gate on the ratio in place of a clip (SAPO, Gao et al. 2025, arXiv:2511.20347)."""

    name: str = "sapo"
    tau_positive: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Temperature of the gate for tokens with positive advantage."""
    tau_negative: Annotated[float, OnResume.BY_NAME] = Field(default=1.05, gt=0, allow_inf_nan=False)
    """Temperature of the gate for other tokens. A higher temperature closes the gate earlier."""


class ValueLossConfig(LossConfig):
    """Squared error of a critic's values, clipped around the values before the update (PPO, arXiv:1707.06347)."""

    trains_on: ClassVar[TrainsOn] = "returns"

    name: str = "value"
    clip: Annotated[float | None, OnResume.BY_NAME] = Field(default=0.2, gt=0, allow_inf_nan=False)
    """A value that an update has moved this far gets no further gradient; null for no limit."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if run.loss is self:
            yield Problem("name", f"is {self.name}, the loss of a critic. Choose another, or set it in `critic.loss`.")


class TruncatedImportanceSamplingConfig(CorrectionConfig):
    """Importance weights up to a cap (TIS, Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
    Off-Policy RL Training")."""

    name: str = "tis"
    level: Literal["token", "sequence"] = "token"
    """`token` takes the ratio of each token, `sequence` the product of the ratios of a sequence."""
    cap: float | None = Field(default=2.0, ge=1, allow_inf_nan=False)
    """Largest weight; null for no limit."""


class MaskedImportanceSamplingConfig(CorrectionConfig):
    """Importance weights if the ratio is within a band, else 0 (IcePop, Ling Team 2025, arXiv:2510.18855)."""

    name: str = "mis"
    level: Literal["token", "sequence"] = "token"
    """`token` takes the ratio of each token, `sequence` the product of the ratios of a sequence."""
    low: float = Field(default=0.5, gt=0, le=1)
    """Lowest accepted ratio."""
    high: float = Field(default=5.0, ge=1, allow_inf_nan=False)
    """Highest accepted ratio."""


class GeometricRejectionConfig(CorrectionConfig):
    """Leave out sequences whose geometric mean of ratios is outside limits (Liu, Li et al. 2025, "When Speed Kills
    Stability")."""

    level: ClassVar[Level] = "geometric"

    name: str = "geometric_rejection"
    low: float = Field(default=0.999, gt=0, le=1)
    """Lowest accepted geometric mean of the ratios."""
    high: float = Field(default=1.001, ge=1, allow_inf_nan=False)
    """Highest accepted geometric mean of the ratios."""


class SequenceRejectionConfig(CorrectionConfig):
    """Leave out sequences whose product of ratios is outside limits (Liu, Li et al. 2025, "When Speed Kills
    Stability")."""

    level: ClassVar[Level] = "sequence"

    name: str = "sequence_rejection"
    low: float = Field(default=0.5, gt=0, le=1)
    """Lowest accepted product of the ratios."""
    high: float = Field(default=2.0, ge=1, allow_inf_nan=False)
    """Highest accepted product of the ratios."""
