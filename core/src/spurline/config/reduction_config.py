"""The `reduction` section: which losses of an optimizer step count the same. What each one computes is in
`spurline.reduction`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from spurline.config.named_section import NamedSection
from spurline.errors import Problem

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class ReductionConfig(NamedSection):
    """Which losses of an optimizer step count the same; a bare string is short for its `name`."""

    name: Literal["token_mean", "sequence_mean", "prompt_mean", "fixed_norm"] = "token_mean"
    """All tokens, all sequences or all prompts whatever their length; `fixed_norm` divides by a constant instead of by
    how many tokens there are (Dr. GRPO, Liu et al. 2025, arXiv:2503.20783)."""
    length: int | None = Field(default=None, gt=0)
    """`fixed_norm` only: tokens to divide by for each trajectory, usually the longest response allowed."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.name == "fixed_norm" and self.length is None:
            yield Problem(
                "length",
                "is required by fixed_norm: the tokens to divide by for each trajectory. Write "
                "`reduction: {name: fixed_norm, length: 512}`, with the longest response you allow.",
            )
        if self.name != "fixed_norm" and self.length is not None:
            yield Problem(
                "length",
                f"is for fixed_norm and has no meaning with {self.name}. Set reduction.name: fixed_norm, or remove it.",
            )
