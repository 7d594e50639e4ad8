"""Build panels from pieces of HTML. All text of a run passes through `text`, which escapes it."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from spurline_insight.report_panel import ReportPanelConfig

_STATUSES = ("finished", "failed", "stopped", "running", "interrupted")


class Panel:
    """The base of panels without settings."""

    def __init__(self, config: ReportPanelConfig) -> None:
        self.config = config


def text(value: Any) -> str:
    """Return the value as HTML text, safe inside elements and quoted attributes."""
    return html.escape(str(value), quote=True)


def cards(items: Iterable[tuple[str, str, str]]) -> str:
    """Return a row of cards. Each card has a label, a value in large type, and a smaller line below."""
    rendered = "".join(
        f'<div class="card"><dt>{text(label)}</dt><dd>{text(value)}</dd><dd class="detail">{text(detail)}</dd></div>'
        for label, value, detail in items
    )
    return f'<dl class="cards">{rendered}</dl>'


def block(*fragments: str, wide: bool = False) -> str:
    """Return the content of one panel. A `wide` panel takes a whole row of the page."""
    return f'<div class="block{" wide" if wide else ""}">{"".join(fragments)}</div>'


def columns(*fragments: str) -> str:
    """Return the fragments in two columns, or in one on a narrow page."""
    return f'<div class="columns even">{"".join(f"<div>{fragment}</div>" for fragment in fragments)}</div>'


def caption(line: str) -> str:
    """Return one line of plain text below a heading."""
    return f'<p class="caption">{text(line)}</p>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, css: str = "") -> str:
    """Return a table whose headings are plain text and whose cells are HTML."""
    head = "".join(f'<th scope="col">{text(heading)}</th>' for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="{text(css)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def shares(parts: Sequence[tuple[str, float, str]]) -> str:
    """Return horizontal bars. Each part is a label, a share from 0 to 1, and a text at the right."""
    rows = "".join(
        f'<li><span class="label">{text(label)}</span>'
        f'<span class="track"><span class="bar" style="width:{100 * min(1.0, max(0.0, share)):.2f}%;'
        f'background:var(--series-{min(number, 8)})"></span></span>'
        f'<span class="amount">{text(amount)}</span></li>'
        for number, (label, share, amount) in enumerate(parts, start=1)
    )
    return f'<ul class="shares">{rows}</ul>'


def status_mark(status: str) -> str:
    """Return the status of a run as a coloured mark."""
    known, shown = (status, status.capitalize()) if status in _STATUSES else ("unknown", status)
    return f'<span class="status {known}">{text(shown)}</span>'


def score(value: float) -> str:
    """Format a loss, norm or score with four significant digits, including trailing zeros."""
    if value == 0:
        return "0"
    return f"{value:.3e}" if not 1e-3 <= abs(value) < 1e6 else f"{value:#.4g}".removesuffix(".")


def scalar(value: Any) -> str:
    """Return a text as it is, and any other value as JSON, which is YAML too."""
    return value if value and isinstance(value, str) else json.dumps(value)
