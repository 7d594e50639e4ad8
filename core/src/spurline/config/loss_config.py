"""What a loss learns from, said by its config, so that a source can refuse one that does not fit its batches.

Light: the loss itself is built later, with torch. A loss whose config does not derive from `LossConfig` trains on
tokens.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from spurline.config.section import ComponentConfig

TrainsOn = Literal["tokens", "advantages", "returns", "pairs"]
"""The tokens as they are; advantages of rollouts; returns, which a critic predicts; or pairs of answers."""


class LossConfig(ComponentConfig):
    """Settings of a loss that says what it trains on."""

    trains_on: ClassVar[TrainsOn] = "tokens"
    uses_rollout_logprobs: ClassVar[bool] = False
    """Whether the loss itself weighs tokens by the logprobs they were sampled with, so that it needs no `correction`
    where they come from older weights."""


def trains_on(loss: ComponentConfig) -> TrainsOn:
    """What the loss with these settings trains on."""
    return loss.trains_on if isinstance(loss, LossConfig) else "tokens"


def uses_rollout_logprobs(loss: ComponentConfig) -> bool:
    """Whether the loss with these settings weighs tokens by the logprobs they were sampled with."""
    return isinstance(loss, LossConfig) and loss.uses_rollout_logprobs
