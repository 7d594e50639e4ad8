"""Refuse models whose config asks for what the local backend would leave out, or would mix up between samples.

Place on the way: loaded model -> this -> probe. It reads configs only, so it also holds where the probe is switched
off; it knows what the probe's few short sequences cannot show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from spurline.errors import DataError, ModelError


@dataclass(frozen=True)
class LengthLimit:
    """Up to `tokens` per sample, rotary frequencies of this type are those of each sample alone."""

    tokens: int
    rope_type: str

    def check(self, longest: int) -> None:
        """Raise DataError for a batch whose longest sample would change the frequencies of the others."""
        if longest > self.tokens:
            raise DataError(
                f"A sample has {longest} tokens, but rotary frequencies of type '{self.rope_type}' switch beyond "
                f"{self.tokens} for all samples of a micro-batch. Shorten it to {self.tokens} tokens."
            )


def check_config(causal: PreTrainedModel, path: str, max_length: int) -> LengthLimit | None:
    """Raise ModelError for what cannot be trained exactly; the limit that batches must keep, when there is one.

    max_length: tokens of the longest sample that the run's data may have.
    """
    name = f"model.path: {path} ({type(causal).__name__})"
    for config in (causal.config, causal.config.get_text_config()):
        if getattr(config, "output_router_logits", False):
            raise ModelError(
                f"{name} sets output_router_logits, which asks for an auxiliary loss on its router; losses here see "
                "log-probabilities only and would leave it out. To train without it set "
                "model.config_overrides: {output_router_logits: false}."
            )
    limit = min(_switching_rope(causal.config.get_text_config()), key=lambda limit: limit.tokens, default=None)
    if limit is not None and max_length > limit.tokens:
        raise ModelError(
            f"{name} has rotary frequencies of type '{limit.rope_type}', which switch for all samples of a micro-batch "
            f"when the longest has more than {limit.tokens} tokens, and data.max_length allows {max_length}. "
            f"Set data.max_length: {limit.tokens} or less."
        )
    return limit


def _switching_rope(config: PretrainedConfig) -> Iterator[LengthLimit]:
    """Rotary settings under which transformers chooses frequencies by the largest position it sees."""
    for settings in _rope_settings(config):
        rope_type = str(settings.get("rope_type") or settings.get("type"))
        longest = getattr(config, "max_position_embeddings", None)
        if rope_type == "longrope":
            own = getattr(config, "original_max_position_embeddings", None)
            longest = settings.get("original_max_position_embeddings") or own or longest
        elif "dynamic" not in rope_type:
            continue
        # Without a known limit every length may switch.
        yield LengthLimit(int(longest or 0), rope_type)


def _rope_settings(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """The settings of the whole model, or one per layer type."""
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, Mapping):
        nested = [value for value in found.values() if isinstance(value, Mapping)]
        yield from nested or [found]
