"""Settings of the advantage algorithms. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.section import OnResume
from spurline_rl.protocols.advantage import AdvantageConfig


class GroupAdvantageConfig(AdvantageConfig):
    """Base of advantages that compare the samples of one prompt."""

    @property
    def smallest_group(self) -> int:
        return 2


class GrpoConfig(GroupAdvantageConfig):
    """The return minus the group's mean, divided by the group's std (Shao et al. 2024, arXiv:2402.03300)."""

    name: str = "grpo"
    normalize_std: Annotated[bool, OnResume.BY_NAME] = True
    """Divide by the group's sample standard deviation."""
    eps: Annotated[float, OnResume.BY_NAME] = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the standard deviation."""

    @property
    def divides_by_spread(self) -> bool:
        return self.normalize_std


class DrGrpoConfig(GroupAdvantageConfig):
    """The return minus the group's mean, without a division (Liu et al. 2025, arXiv:2503.20783)."""

    goes_with = "loss: ppo and reduction: {name: fixed_norm, length: N}"

    name: str = "dr_grpo"


class RlooConfig(GroupAdvantageConfig):
    """The return minus the mean of the group's other samples (Ahmadian et al. 2024, arXiv:2402.14740)."""

    goes_with = "loss: policy_gradient"

    name: str = "rloo"


class MaxRlConfig(GroupAdvantageConfig):
    """The return minus the group mean, divided by the mean; for rewards >= 0 (Tajwar et al. 2026, arXiv:2602.02710)."""

    name: str = "maxrl"
    eps: Annotated[float, OnResume.BY_NAME] = Field(default=1e-6, gt=0, allow_inf_nan=False)
    """Added to the mean."""

    @property
    def divides_by_spread(self) -> bool:
        return True


class ReinforcePlusPlusConfig(AdvantageConfig):
    """The return minus a baseline, normalised over all samples (REINFORCE++, Hu et al. 2025, arXiv:2501.03262)."""

    name: str = "reinforce_pp"
    baseline: Annotated[Literal["group", "batch"], OnResume.BY_NAME] = "group"
    """`group` subtracts the mean return of the prompt's samples, `batch` the mean discounted return of all tokens."""
    gamma: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0, le=1)
    """Discount per token; used with `baseline: batch`."""
    eps: Annotated[float, OnResume.BY_NAME] = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the standard deviation."""

    @property
    def smallest_group(self) -> int:
        return 2 if self.baseline == "group" else 1


class GaeConfig(AdvantageConfig):
    """Generalised advantage estimation with a critic (Schulman et al. 2016, arXiv:1506.02438)."""

    uses_critic: ClassVar[bool] = True
    goes_with = "loss: ppo and critic: {}"

    name: str = "gae"
    gamma: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0, le=1)
    """Discount per token."""
    lam: Annotated[float, OnResume.BY_NAME] = Field(default=0.95, ge=0, le=1)
    """Decay of later temporal differences. 0 takes later rewards as the critic estimates them, 1 as they were."""
    normalize: Annotated[bool, OnResume.BY_NAME] = True
    """Shift and scale the advantages to mean 0 and standard deviation 1 over all trained tokens."""
    eps: Annotated[float, OnResume.BY_NAME] = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Added to the standard deviation."""
