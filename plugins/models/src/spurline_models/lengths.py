"""Compare the lengths of the data with the positions of the model, before any weight is loaded.

A sequence beyond a learned table ends a run with an error of torch; one beyond rotary positions trains silently on
what the model has never seen. What counts is the longest sequence there really is, not the one that settings allow.
"""

from __future__ import annotations

from collections.abc import Sequence

from spurline.config.loading import LoadedConfig
from spurline.errors import ConfigError, Problem
from spurline.protocols.lengths import KnowsLongest, Longest
from spurline_models.architecture import load_model_config
from spurline_models.streams.positions import PositionLimit, position_limit


def check_lengths(loaded: LoadedConfig, source: KnowsLongest, evaluations: Sequence[KnowsLongest]) -> list[str]:
    """Notes on limits that no sequence reaches. Raises ConfigError for one that is too long, ModelError, DataError."""
    limit = position_limit(load_model_config(loaded.config.model))
    trained = source.longest()
    found = [one for one in (trained, *(evaluation.longest() for evaluation in evaluations)) if one is not None]
    for longest in found:
        if limit is not None and longest.tokens > limit.tokens and not _insists(loaded, limit):
            raise ConfigError([Problem(longest.setting, _too_long(loaded, longest, limit))], loaded.origin)
    # What the same setting bounds is made the same way: attempts at held-out prompts go to the source's engine too.
    like = [one for one in found if trained is not None and one.setting == trained.setting]
    longest = max(like, key=lambda one: one.tokens, default=None)
    context = loaded.config.source.facts.context_tokens
    if context is not None:
        _check_engine(loaded, longest, context, limit)
    return _notes(loaded, longest, limit)


def _insists(loaded: LoadedConfig, limit: PositionLimit) -> bool:
    return limit.extends and loaded.config.model.allow_extrapolation


def _too_long(loaded: LoadedConfig, longest: Longest, limit: PositionLimit) -> str:
    model = f"the model of {loaded.config.model.path} has {limit.tokens:,} positions ({limit.origin})"
    insist = (
        " Or set model.allow_extrapolation: true to go beyond what the model has learned."
        if limit.extends
        else " They are a table that ends there, so model.allow_extrapolation cannot help."
    )
    if longest.prompt_tokens is None:
        fix = f"Set data.max_length: {limit.tokens} (data.too_long says what becomes of longer samples)"
        return f"allows {longest.where} with {longest.tokens:,} tokens, but {model}. {fix}.{insist}"
    left = limit.tokens - longest.prompt_tokens
    response = longest.tokens - longest.prompt_tokens
    fix = f"Set it to {left} or less" if left > 0 else "Leave such rows out"
    return (
        f"is {response:,}, and the prompt of {longest.where} has {longest.prompt_tokens:,} tokens, {longest.tokens:,} "
        f"together, but {model}. {fix}.{insist}"
    )


def _check_engine(loaded: LoadedConfig, longest: Longest | None, context: int, limit: PositionLimit | None) -> None:
    """The engine's own limit on prompt and response."""
    key = "source.engine"
    if limit is not None and context > limit.tokens and not _insists(loaded, limit):
        insist = " Or set model.allow_extrapolation: true." if limit.extends else ""
        text = (
            f"allows {context:,} tokens of prompt and response, but the model of {loaded.config.model.path} has "
            f"{limit.tokens:,} positions ({limit.origin}). Lower it to {limit.tokens}.{insist}"
        )
        raise ConfigError([Problem(key, text)], loaded.origin)
    if longest is not None and longest.prompt_tokens is not None and longest.tokens > context:
        text = (
            f"allows {context:,} tokens of prompt and response, but the prompt of {longest.where} has "
            f"{longest.prompt_tokens:,} and {longest.setting} asks for {longest.tokens - longest.prompt_tokens:,} "
            f"more. Raise the engine's limit to {longest.tokens}, or lower {longest.setting}."
        )
        raise ConfigError([Problem(key, text)], loaded.origin)


def _notes(loaded: LoadedConfig, longest: Longest | None, limit: PositionLimit | None) -> list[str]:
    if limit is None or longest is None:
        return []
    if longest.tokens > limit.tokens:
        return [
            f"model.allow_extrapolation: {longest.where} has {longest.tokens:,} tokens, beyond the {limit.tokens:,} "
            f"positions of the model ({limit.origin})"
        ]
    max_length = loaded.config.data.max_length
    if longest.prompt_tokens is None and max_length > limit.tokens:
        return [
            f"data.max_length {max_length:,} is over the {limit.tokens:,} positions of the model ({limit.origin}), but "
            f"no sample is: the longest has {longest.tokens:,} tokens"
        ]
    turns = loaded.config.source.facts.most_turns
    if turns > 1 and longest.tokens + (turns - 1) * (longest.tokens - (longest.prompt_tokens or 0)) > limit.tokens:
        return [f"an attempt of {turns} turns ends early where it fills the {limit.tokens:,} positions of the model"]
    return []
