"""Compare the length of the data with the positions of the model, before any weight is loaded.

If a model has a table of positions, a sequence longer than the table would end the run with an error of torch. Rotary
positions can be computed for any length, but the model has only been trained up to a limit, which rope scaling extends.
Some kinds of rope scaling also change the frequencies of all samples in a batch if one sample is long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from spurline.config.loading import LoadedConfig
from spurline.errors import ConfigError, DataError, Problem
from spurline.protocols.dataset import KnowsLongest, Longest
from spurline_models.architecture import load_model_config

_COUNTS_FROM_ORIGINAL = ("yarn", "llama3", "longrope", "linear", "dynamic")
"""Types of rope scaling whose `factor` multiplies the original length."""


@dataclass(frozen=True)
class PositionLimit:
    """A limit on the tokens of a sequence.

    `extends` says whether longer sequences can be computed at all. `origin` names the source of the limit.
    """

    tokens: int
    extends: bool
    origin: str


def position_limit(config: PretrainedConfig) -> PositionLimit | None:
    """Return the limit of a model with this config, or None if its positions have no limit, as with ALiBi."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0 or getattr(text, "alibi", False):
        return None
    scaled = [_scaled(settings, positions) for settings in _rope_settings(text)]
    if not scaled:
        return PositionLimit(positions, extends=False, origin="max_position_embeddings")
    return min(scaled, key=lambda limit: limit.tokens)


def _scaled(settings: Mapping[str, Any], positions: int) -> PositionLimit:
    # In some configs, `max_position_embeddings` already includes the scaling. Take the larger number.
    name, factor = rope_type(settings), settings.get("factor")
    tokens = positions
    if name in _COUNTS_FROM_ORIGINAL and isinstance(factor, (int, float)):
        original = settings.get("original_max_position_embeddings") or positions
        tokens = max(positions, int(original * factor))
    origin = "max_position_embeddings" if tokens == positions else f"rope scaling '{name}' with factor {factor:g}"
    return PositionLimit(tokens, extends=True, origin=origin)


@dataclass(frozen=True)
class LengthLimit:
    """A limit on the tokens of a sample. Within it, no sample changes the rotary frequencies of the others."""

    tokens: int
    rope_type: str

    def check(self, longest: int) -> None:
        """Raise DataError if `longest`, the tokens of a batch's longest sample, is over the limit."""
        if longest > self.tokens:
            raise DataError(
                f"A sample has {longest} tokens. Beyond {self.tokens}, rotary frequencies of type '{self.rope_type}' "
                f"change for all samples of the micro-batch. Shorten the sample to {self.tokens} tokens."
            )


def length_limit(config: PretrainedConfig) -> LengthLimit | None:
    """Return the limit of a model whose rotary frequencies depend on the longest sample, or None."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    limits: list[LengthLimit] = []
    for settings in _rope_settings(text):
        name = rope_type(settings)
        if name == "longrope":
            own = getattr(text, "original_max_position_embeddings", None)
            # If no limit is known, frequencies may change at any length.
            limits.append(
                LengthLimit(int(settings.get("original_max_position_embeddings") or own or longest or 0), name)
            )
        elif "dynamic" in name:
            limits.append(LengthLimit(int(longest or 0), name))
    return min(limits, key=lambda limit: limit.tokens, default=None)


def _rope_settings(config: PretrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Yield the rotary settings of the whole model, or of each type of layer. A model may have none."""
    found = getattr(config, "rope_parameters", None)
    if isinstance(found, Mapping):
        yield from [value for value in found.values() if isinstance(value, Mapping)] or [found]


def rope_type(settings: Mapping[str, Any]) -> str:
    return str(settings.get("rope_type") or settings.get("type"))


def check_lengths(loaded: LoadedConfig, source: KnowsLongest, evaluations: Sequence[KnowsLongest]) -> list[str]:
    """Check the longest sequences, and return a note if only `model.allow_extrapolation` permits them.

    Raises:
        ConfigError: If a sequence is too long for the model or the engine.
        ModelError: If the model's config cannot be read.
    """
    limit = position_limit(load_model_config(loaded.config.model))
    trained = source.longest()
    found = [one for one in (trained, *(evaluation.longest() for evaluation in evaluations)) if one is not None]
    for longest in found:
        if limit is not None and longest.tokens > limit.tokens and not _insists(loaded, limit):
            raise ConfigError([Problem(longest.setting, _too_long(loaded, longest, limit))], loaded.origin)
    # The engine of the source also generates for evaluations that have the same length setting.
    like = [one for one in found if trained is not None and one.setting == trained.setting]
    longest = max(like, key=lambda one: one.tokens, default=None)
    context = loaded.config.source.facts.context_tokens
    if context is not None:
        _check_engine(loaded, longest, context, limit)
    if limit is None or longest is None or longest.tokens <= limit.tokens:
        return []
    return [
        f"model.allow_extrapolation: {longest.where} has {longest.tokens:,} tokens, beyond the {limit.tokens:,} "
        f"positions of the model ({limit.origin})"
    ]


def _insists(loaded: LoadedConfig, limit: PositionLimit) -> bool:
    return limit.extends and loaded.config.model.allow_extrapolation


def _too_long(loaded: LoadedConfig, longest: Longest, limit: PositionLimit) -> str:
    if longest.prompt_tokens is None:
        what = f"allows {longest.where} with {longest.tokens:,} tokens"
        fix = f"Set data.max_length: {limit.tokens} (data.too_long chooses what happens to longer samples)."
    else:
        left = limit.tokens - longest.prompt_tokens
        what = (
            f"is {longest.tokens - longest.prompt_tokens:,}, and the prompt of {longest.where} has "
            f"{longest.prompt_tokens:,} tokens, {longest.tokens:,} together"
        )
        fix = f"Set it to {left} or less." if left > 0 else "Leave such rows out."
    return f"{what}, but {_positions(loaded, limit)}. {fix}{_alternative(limit)}"


def _positions(loaded: LoadedConfig, limit: PositionLimit) -> str:
    return f"the model of {loaded.config.model.path} has {limit.tokens:,} positions ({limit.origin})"


def _alternative(limit: PositionLimit) -> str:
    if limit.extends:
        return " Or set model.allow_extrapolation: true to go beyond what the model has learned."
    return " The positions are a table that ends there, so model.allow_extrapolation cannot help."


def _check_engine(loaded: LoadedConfig, longest: Longest | None, context: int, limit: PositionLimit | None) -> None:
    """Raise ConfigError if the engine's limit is over the model's, or too low for the longest prompt and response."""
    allows = f"allows {context:,} tokens of prompt and response, but"
    if limit is not None and context > limit.tokens and not _insists(loaded, limit):
        text = f"{allows} {_positions(loaded, limit)}. Lower the engine's limit to {limit.tokens}.{_alternative(limit)}"
    elif longest is not None and longest.prompt_tokens is not None and longest.tokens > context:
        text = (
            f"{allows} {longest.where} needs {longest.tokens:,}, including {longest.prompt_tokens:,} for its prompt. "
            f"Raise the engine's limit to {longest.tokens}, or lower {longest.setting}."
        )
    else:
        return
    raise ConfigError([Problem("source.engine", text)], loaded.origin)
