"""Say in plain words what predictions come down to: which side is slower, which knobs to set, what that would bring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from spurline_async_rl.simulation.prediction import Knobs, Prediction, Predictor, recommended

_BALANCED = 1.15
"""Sides whose capacities differ by less are called balanced."""
_WORTH_SAYING = 1.02


def advice(predict: Predictor, current: Prediction, found: Sequence[Prediction]) -> list[str]:
    """Sentences, the most useful ones first. found: what `search` tried."""
    return [
        _sides(current),
        *_settings(current, recommended([current, *found]), found),
        *_engines(predict, current),
    ]


def _sides(current: Prediction) -> str:
    generation, training = current.generation_per_s, current.training_per_s
    numbers = f"engines can make {generation:.3g} groups a second, training can take {training:.3g}"
    share = min(1.0, current.efficiency)
    reached = f"The config reaches {current.figures.groups_per_second:.3g}, {share:.0%} of the possible."
    if max(generation, training) < _BALANCED * min(generation, training):
        return f"Generation and training are balanced: {numbers}. {reached}"
    slower = "Generation" if generation < training else "Training"
    return f"{slower} is the slower side: {numbers}. {reached}"


def _settings(current: Prediction, best: Prediction, found: Sequence[Prediction]) -> list[str]:
    gain = best.figures.groups_per_second / current.figures.groups_per_second
    now, then = current.knobs, best.knobs
    if now == then or (gain < _WORTH_SAYING and then.max_staleness == now.max_staleness):
        return ["Its settings are good: no other bound or number of groups at once gains 2% without older tokens."]
    changes = [
        f"{name}: {new}"
        for name, old, new in (
            ("max_staleness", now.max_staleness, then.max_staleness),
            ("max_concurrent_groups", now.max_running, then.max_running),
        )
        if new != old
    ]
    before, after = current.figures.mean_staleness, best.figures.mean_staleness
    age = f"tokens {after:.2f} updates old on average instead of {before:.2f}"
    effect = f"{gain:.2f} times the throughput" if abs(gain - 1) >= 0.005 else "the same throughput"
    lines = [f"Set source.{' and source.'.join(changes)}: {effect}, {age}."]
    fresher = [item for item in found if item.knobs.max_staleness < then.max_staleness]
    if fresher:
        bound = max(item.knobs.max_staleness for item in fresher)
        other = max(
            (item for item in fresher if item.knobs.max_staleness == bound),
            key=lambda item: item.figures.groups_per_second,
        )
        share = other.figures.groups_per_second / best.figures.groups_per_second
        groups = other.knobs.max_running
        lines.append(
            f"With max_staleness: {bound} and max_concurrent_groups: {groups} it would be {share:.0%} of that."
        )
    return lines


def _engines(predict: Predictor, current: Prediction) -> list[str]:
    knobs, ratio = current.knobs, current.training_per_s / current.generation_per_s
    if ratio >= _BALANCED:
        more = math.ceil(knobs.engines * ratio)
        fed = _scaled(knobs, more)
        if fed.is_allowed:
            gain = predict(fed).figures.groups_per_second / current.figures.groups_per_second
            return [f"{more} engines and {fed.max_running} groups at once would bring {gain:.2f} times the throughput."]
    fewer = max(1, math.ceil(knobs.engines * ratio * 1.1))
    if fewer < knobs.engines:
        left = _scaled(knobs, fewer)
        share = predict(left).figures.groups_per_second / current.figures.groups_per_second
        return [f"{fewer} engines and {left.max_running} groups at once would do {share:.0%} of the work."]
    return []


def _scaled(knobs: Knobs, engines: int) -> Knobs:
    """As many groups on each engine as before, as far as the bound allows."""
    most = knobs.batch_size * (knobs.max_staleness + 1)
    return replace(knobs, engines=engines, max_running=min(most, max(1, knobs.max_running * engines // knobs.engines)))
