"""Show in the report how busy the event loop was that all rollouts pass through, from the metrics `controller/...`."""

from __future__ import annotations

from statistics import median

from spurline_async_rl.source.capacity import BUSY_LOOP
from spurline_insight.report.figure import Trace, level, line, one_of_several, step_figure
from spurline_insight.report.markup import Panel, block, caption, columns
from spurline_insight.report_panel import RunRecord


class ControllerPanel(Panel):
    """Lag, CPU share and tokens of the event loop over the steps."""

    title = "Controller"

    def render(self, record: RunRecord) -> str | None:
        """None for a run that measured no event loop."""
        steps, shares = record.series("controller/cpu_share")
        if not steps:
            return None
        rate_steps, rates = record.series("controller/tokens_per_s")
        _, lags = record.series("controller/lag_p99")
        _, longest = record.series("controller/lag_max")
        head = (
            f"The event loop of the rollouts was busy for {median(shares):.0%} of the time (median of the steps), with "
            f"{median(rates):,.0f} tokens/s; 99 % of the calls waited for it {1000 * median(lags):.3g} ms at most, the "
            f"longest {1000 * max(longest):,.0f} ms"
        )
        busy = [
            *one_of_several("CPU share", steps, shares, "--series-1"),
            level("busy", steps, BUSY_LOOP, "--series-6"),
        ]
        return block(
            caption(f"{head}."),
            columns(
                step_figure(
                    _lag_traces(record), "Seconds waited for it", label="Lag of the event loop over steps", type="log"
                ),
                step_figure(busy, "Share of the time", label="CPU share", tickformat=".0%", rangemode="tozero"),
                step_figure(
                    one_of_several("tokens", rate_steps, rates, "--series-3"),
                    "Tokens per second",
                    label="Tokens through the event loop over steps",
                    rangemode="tozero",
                ),
            ),
            wide=True,
        )


def _lag_traces(record: RunRecord) -> list[Trace]:
    # A step that was over before the loop had been looked at has lags of 0, which a logarithmic axis has no place for.
    looked_at = {step for step, lag in zip(*record.series("controller/lag_max"), strict=True) if lag > 0}

    def lags(key: str) -> tuple[list[int], list[float]]:
        points = zip(*record.series(f"controller/lag_{key}"), strict=True)
        kept = [(step, lag) for step, lag in points if step in looked_at]
        return [step for step, _ in kept], [lag for _, lag in kept]

    named = (("p50", "median", "--series-2"), ("p99", "99 %", "--series-1"), ("max", "longest", "--series-6"))
    return [line(name, *lags(key), color, mode="lines", hovertemplate="%{y:.3~s} s") for key, name, color in named]
