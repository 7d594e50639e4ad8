"""Show a run at a glance: its headline numbers, its problems, and its settings."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML

from spurline.trackers.readout import clock, quantity
from spurline_insight.health import findings
from spurline_insight.report.markup import Panel, block, cards, scalar, score, text
from spurline_insight.report.panels.speed import generation_speed, training_speed
from spurline_insight.report.record import REWARD, evaluation_losses, evaluation_scores, label_of
from spurline_insight.report_panel import RunRecord

_MAX_SCORES = 3
Card = tuple[str, str, str]
"""Label, value, and a smaller line below."""


class SummaryPanel(Panel):
    """Final loss or reward, best evaluation, speed, time, steps, tokens and size, as cards."""

    title = "Summary"
    order = 0

    def render(self, record: RunRecord) -> str | None:
        found = [*_progress_cards(record), *_evaluation_cards(record), *_speed_cards(record), *_size_cards(record)]
        return cards(found) if found else None


def _progress_cards(record: RunRecord) -> list[Card]:
    """Return the reward if recorded, otherwise the loss. A policy's loss does not show how good the policy is."""
    for name, noun in ((REWARD, "reward"), ("loss", "loss")):
        _, values = record.series(name)
        if values:
            label = f"{'Final' if record.summary.get('status') == 'finished' else 'Latest'} {noun}"
            return [(label, score(values[-1]), f"from {score(values[0])}" if len(values) > 1 else "")]
    return []


def _evaluation_cards(record: RunRecord) -> list[Card]:
    """Return the lowest held-out losses and the highest scores, each with its step."""
    scores, _ = evaluation_scores(record)
    found: list[Card] = []
    for name in evaluation_losses(record):
        steps, values = record.series(name)
        best = min(values)
        found.append((f"Best {label_of(name, 'eval')}", score(best), f"at step {steps[values.index(best)]:,}"))
    for name in scores[:_MAX_SCORES]:
        steps, values = record.series(name)
        best = max(values)
        found.append((f"Best {label_of(name)}", f"{best:.1%}", f"at step {steps[values.index(best)]:,}"))
    return found


def _speed_cards(record: RunRecord) -> list[Card]:
    found: list[Card] = []
    trained, generated = training_speed(record), generation_speed(record)
    if trained is not None:
        found.append(("Tokens per second", quantity(trained.mean), "training only"))
    if generated is not None:
        found.append(("Generated per second", quantity(generated.mean), "tokens of responses"))
    _, times = record.series("time/step")
    if times:
        mean = sum(times) / len(times)
        found.append(("Time in steps", clock(sum(times)), f"{quantity(mean)} s per step"))
    return found


def _size_cards(record: RunRecord) -> list[Card]:
    found: list[Card] = []
    total = record.summary.get("total_steps")
    if record.metrics:
        last = record.metrics[-1]
        steps = f"{int(last['step']):,}" + (f" / {total:,}" if total is not None else "")
        found.append(("Steps", steps, f"{quantity(float(last['epoch']))} epochs" if "epoch" in last else ""))
    _, tokens = record.series("tokens")
    if tokens:
        found.append(("Tokens seen", quantity(sum(tokens)), f"{quantity(sum(tokens) / len(tokens))} per step"))
    parameters = record.summary.get("parameters")
    if parameters is not None:
        found.append(("Parameters", quantity(parameters), f"{parameters:,}" if parameters >= 1000 else ""))
    return found


class HealthPanel(Panel):
    """Problems of the run with their steps, the most frequent first. The terminal shows the same sentences."""

    title = "Health"
    order = 10

    def render(self, record: RunRecord) -> str | None:
        found = findings(record.metrics, record.config)
        if not found:
            return None
        entries = "".join(
            f"<li><span>{text(finding.words)}</span> <small>{text(finding.when)}</small></li>" for finding in found
        )
        return block(f'<ul class="warnings">{entries}</ul>', wide=True)


class ConfigPanel(Panel):
    """Settings that a resume changed, all settings of the run including defaults, and versions of packages."""

    title = "Configuration"
    order = 910

    def render(self, record: RunRecord) -> str | None:
        fragments: list[str] = []
        if history := record.summary.get("history"):
            entries = "".join(f"<li>{text(_change(entry))}</li>" for entry in history)
            fragments.append(f"<h3>Changed during the run</h3><ul>{entries}</ul>")
        if record.config:
            fragments.append(_as_yaml(record.config))
        if versions := record.summary.get("versions"):
            fragments.append(f"<h3>Versions</h3>{_as_yaml(versions)}")
        return block(*fragments, wide=True) if fragments else None


def _as_yaml(settings: Any) -> str:
    out, yaml = StringIO(), YAML()
    yaml.dump(settings, out)
    return f'<pre class="settings">{text(out.getvalue())}</pre>'


def _change(entry: Mapping[str, Any]) -> str:
    values = (entry["before"], entry["now"])
    # If a component was replaced, show only the names of both components.
    before, now = (scalar(value.get("name", value) if isinstance(value, Mapping) else value) for value in values)
    return f"after step {entry['step']:,}: {entry['key']}: {before} -> {now}"
