"""Plot how well a reward model orders answers or steps, and how well its confidence fits."""

from __future__ import annotations

from typing import Any

from spurline_insight.report.markup import Panel, block, caption, columns
from spurline_insight.report_panel import RunRecord
from spurline_preference.panel import plot_held_out
from spurline_reward_models.losses import BINS, CALIBRATION


class RewardModelPanel(Panel):
    """Plots of accuracy beside confidence, of scores, and of accuracy by confidence, in training and held out."""

    title = "Reward model"
    order = 131

    def render(self, record: RunRecord) -> str | None:
        of = "preference" if record.series("preference/accuracy")[0] else "reward_model"
        steps, accuracies = record.series(f"{of}/accuracy")
        if not steps or not record.series("reward_model/confidence")[0]:
            return None
        share: dict[str, Any] = {"tickformat": ".0%", "range": [-0.02, 1.02]}
        sure = {f"{of}/accuracy": "accuracy", "reward_model/confidence": "confidence"}
        bins = {f"reward_model/{CALIBRATION}_{low:g}": f"confidence from {low:.0%}" for low in BINS}
        plots = [
            plot_held_out(record, sure, "In the right order, and expected", chance=0.5, **share),
            plot_held_out(record, {"reward_model/score": "score"}, "Score"),
            plot_held_out(record, bins, "Accuracy by confidence", **share),
        ]
        head = f"Accuracy {accuracies[-1]:.1%} at step {steps[-1]:,}"
        return block(caption(head), columns(*(plot for plot in plots if plot)), wide=True)
