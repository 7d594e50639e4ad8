"""What was off in an RL run, in words, with the steps at which it was. The same sentences as on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from spurline.builtin.configs import ReportPanelConfig
from spurline.protocols.report_panel import RunRecord
from spurline.report.markup import block, text
from spurline.rl.health_words import health_words

_MAX_STRETCHES = 8


class HealthPanel:
    """One entry for each kind of trouble, the most frequent first, in the words of the last step that had it."""

    title = "Health"

    def __init__(self, config: ReportPanelConfig) -> None:
        self._config = config

    def render(self, record: RunRecord) -> str | None:
        """None when nothing was off."""
        places: dict[str, list[int]] = {}
        latest: dict[str, str] = {}
        for place, metrics in enumerate(record.metrics):
            for kind, words in health_words(metrics).items():
                places.setdefault(kind, []).append(place)
                latest[kind] = words
        if not places:
            return None
        steps = [int(metrics["step"]) for metrics in record.metrics]
        entries = "".join(
            f"<li><span>{text(latest[kind])}</span> <small>{text(_when(places[kind], steps))}</small></li>"
            for kind in sorted(places, key=lambda kind: -len(places[kind]))
        )
        return block(f'<ul class="warnings">{entries}</ul>', wide=True)


def _when(places: Sequence[int], steps: Sequence[int]) -> str:
    """`Steps 3 to 7, 12 (6 of 60)`; places: indices into `steps`, ascending."""
    if len(places) == len(steps):
        return "Every step" if len(steps) > 1 else f"Step {steps[0]:,}"
    stretches: list[list[int]] = []
    for place in places:
        if stretches and place == stretches[-1][1] + 1:
            stretches[-1][1] = place
        else:
            stretches.append([place, place])
    shown = [_stretch(steps[first], steps[last]) for first, last in stretches[:_MAX_STRETCHES]]
    more = f" and later, last {steps[places[-1]]:,}" if len(stretches) > _MAX_STRETCHES else ""
    noun = "Step" if len(places) == 1 else "Steps"
    return f"{noun} {', '.join(shown)}{more} ({len(places):,} of {len(steps):,})"


def _stretch(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
