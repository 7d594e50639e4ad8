"""Compare the lengths of the data with the positions of the model, before any weight is loaded.

If a model has a table of positions, a longer sequence ends the run with an error of torch. If it has rotary positions,
it trains on positions that it has never seen, without any error. The check uses the longest sequence of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

from spurline.config.loading import LoadedConfig
from spurline.errors import ConfigError, Problem
from spurline.protocols.dataset import KnowsLongest, Longest
from spurline_models.architecture import load_model_config
from spurline_models.streams.positions import PositionLimit, position_limit


def check_lengths(loaded: LoadedConfig, source: KnowsLongest, evaluations: Sequence[KnowsLongest]) -> list[str]:
    """Check the longest sequences, and return notes on those that only `model.allow_extrapolation` permits.

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
    # The source's engine also makes held-out attempts, whose length has the same setting as its limit.
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
    model = _positions(loaded, limit)
    insist = (
        " Or set model.allow_extrapolation: true to go beyond what the model has learned."
        if limit.extends
        else " They are a table that ends there, so model.allow_extrapolation cannot help."
    )
    if longest.prompt_tokens is None:
        fix = f"Set data.max_length: {limit.tokens} (data.too_long says what becomes of longer samples)"
        return f"allows {longest.where} with {longest.tokens:,} tokens, but {model}. {fix}.{insist}"
    left = limit.tokens - longest.prompt_tokens
    fix = f"Set it to {left} or less" if left > 0 else "Leave such rows out"
    return (
        f"is {longest.tokens - longest.prompt_tokens:,}, and the prompt of {longest.where} has "
        f"{longest.prompt_tokens:,} tokens, {longest.tokens:,} together, but {model}. {fix}.{insist}"
    )


def _positions(loaded: LoadedConfig, limit: PositionLimit) -> str:
    return f"the model of {loaded.config.model.path} has {limit.tokens:,} positions ({limit.origin})"


def _check_engine(loaded: LoadedConfig, longest: Longest | None, context: int, limit: PositionLimit | None) -> None:
    """Raise ConfigError if the engine's own limit on prompt and response does not fit."""
    text: str | None = None
    allows = f"allows {context:,} tokens of prompt and response, but"
    if limit is not None and context > limit.tokens and not _insists(loaded, limit):
        insist = " Or set model.allow_extrapolation: true." if limit.extends else ""
        text = f"{allows} {_positions(loaded, limit)}. Lower it to {limit.tokens}.{insist}"
    elif longest is not None and longest.prompt_tokens is not None and longest.tokens > context:
        text = (
            f"{allows} {longest.where} asks for {longest.tokens:,}, {longest.prompt_tokens:,} of them its prompt. "
            f"Raise the engine's limit to {longest.tokens}, or lower {longest.setting}."
        )
    if text is not None:
        raise ConfigError([Problem("source.engine", text)], loaded.origin)
