"""Read from a model's config how many positions it has. Imports no torch.

A learned table ends. Rotary positions can be computed for any length, but the model has only been trained up to a
limit, which rope scaling moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

_COUNTS_FROM_ORIGINAL = ("yarn", "llama3", "longrope", "linear", "dynamic")
"""Types of rope scaling whose `factor` multiplies the length before scaling."""


@dataclass(frozen=True)
class PositionLimit:
    """The tokens of one sequence, whether longer ones can be computed at all, and the origin of the limit."""

    tokens: int
    extends: bool
    origin: str


def position_limit(config: PretrainedConfig) -> PositionLimit | None:
    """Return the limit of a model with this config; None if its positions have no end, such as ALiBi's."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0 or getattr(text, "alibi", False):
        return None
    scaled = [_scaled(settings, positions) for settings in rope_settings(text)]
    if not scaled:
        return PositionLimit(positions, extends=False, origin="max_position_embeddings")
    return min(scaled, key=lambda limit: limit.tokens)


def rope_settings(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary settings of the whole model, or of each type of layer; none for other positions."""
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, Mapping):
        yield from [value for value in found.values() if isinstance(value, Mapping)] or [found]


def rope_type(settings: Mapping[str, Any]) -> str:
    return str(settings.get("rope_type") or settings.get("type"))


def _scaled(settings: Mapping[str, Any], positions: int) -> PositionLimit:
    # Configs differ in whether `max_position_embeddings` counts the scaling already; the larger reading holds.
    name, factor = rope_type(settings), settings.get("factor")
    tokens = positions
    if name in _COUNTS_FROM_ORIGINAL and isinstance(factor, (int, float)):
        original = settings.get("original_max_position_embeddings") or positions
        tokens = max(positions, int(original * factor))
    origin = "max_position_embeddings" if tokens == positions else f"rope scaling '{name}' with factor {factor:g}"
    return PositionLimit(tokens, extends=True, origin=origin)
