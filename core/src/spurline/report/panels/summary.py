"""The headline numbers of a run."""

from __future__ import annotations

from spurline.builtin.configs import ReportPanelConfig
from spurline.builtin.trackers.readout import clock, quantity, score, training_seconds
from spurline.protocols.report_panel import RunRecord
from spurline.report.evaluations import evaluation_losses, evaluation_scores, label_of
from spurline.report.markup import Card, cards
from spurline.report.panels.rollouts import REWARD
from spurline.report.panels.speed import generation_rates

_MAX_SCORES = 3


class SummaryPanel:
    """Final loss or reward, best evaluation, speed, time, steps, tokens and size, as cards."""

    title = "Summary"

    def __init__(self, config: ReportPanelConfig) -> None:
        self._config = config

    def render(self, record: RunRecord) -> str | None:
        """None when there is not a single number."""
        found = [*_progress_cards(record), *_evaluation_cards(record), *_speed_cards(record), *_size_cards(record)]
        return cards(found) if found else None


def _progress_cards(record: RunRecord) -> list[Card]:
    """The reward where there is one: a policy's loss says nothing of how good it is."""
    for name, noun in ((REWARD, "reward"), ("loss", "loss")):
        _, values = record.series(name)
        if values:
            label = f"{'Final' if record.summary.get('status') == 'finished' else 'Latest'} {noun}"
            return [Card(label, score(values[-1]), f"from {score(values[0])}" if len(values) > 1 else "")]
    return []


def _evaluation_cards(record: RunRecord) -> list[Card]:
    """Lowest held-out losses and highest scores, each with the step they were reached at."""
    scores, _ = evaluation_scores(record)
    found: list[Card] = []
    for name in evaluation_losses(record):
        steps, values = record.series(name)
        best = min(range(len(values)), key=values.__getitem__)
        found.append(Card(f"Best {label_of(name, 'eval')}", score(values[best]), f"at step {steps[best]:,}"))
    for name in scores[:_MAX_SCORES]:
        steps, values = record.series(name)
        best = max(range(len(values)), key=values.__getitem__)
        found.append(Card(f"Best {label_of(name)}", f"{values[best]:.1%}", f"at step {steps[best]:,}"))
    return found


def _speed_cards(record: RunRecord) -> list[Card]:
    found: list[Card] = []
    timed = [
        (float(metrics["tokens"]), seconds)
        for metrics in record.metrics
        if "tokens" in metrics and (seconds := training_seconds(metrics)) is not None
    ]
    if timed:
        rate = sum(tokens for tokens, _ in timed) / sum(seconds for _, seconds in timed)
        found.append(Card("Tokens per second", quantity(rate), "training only"))
    generated = generation_rates(record)
    if generated:
        rate = sum(tokens for _, tokens, _ in generated) / sum(seconds for _, _, seconds in generated)
        found.append(Card("Generated per second", quantity(rate), "tokens of responses"))
    _, times = record.series("time/step")
    if times:
        mean = sum(times) / len(times)
        found.append(Card("Time in steps", clock(sum(times)), f"{quantity(mean)} s per step"))
    return found


def _size_cards(record: RunRecord) -> list[Card]:
    found: list[Card] = []
    total = record.summary.get("total_steps")
    if record.metrics:
        last = record.metrics[-1]
        steps = f"{int(last['step']):,}" + (f" / {total:,}" if total is not None else "")
        found.append(Card("Steps", steps, f"{quantity(float(last['epoch']))} epochs" if "epoch" in last else ""))
    _, tokens = record.series("tokens")
    if tokens:
        found.append(Card("Tokens seen", quantity(sum(tokens)), f"{quantity(sum(tokens) / len(tokens))} per step"))
    parameters = record.summary.get("parameters")
    if parameters is not None:
        found.append(Card("Parameters", quantity(parameters), f"{parameters:,}" if parameters >= 1000 else ""))
    return found
