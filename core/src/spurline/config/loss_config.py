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


def trains_on(loss: ComponentConfig) -> TrainsOn:
    """What the loss with these settings trains on."""
    return loss.trains_on if isinstance(loss, LossConfig) else "tokens"
