"""The resolved configuration as a tree that can be folded, and the versions of what ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spurline.builtin.configs import ReportPanelConfig
from spurline.protocols.report_panel import RunRecord
from spurline.report.markup import block, text


class ConfigPanel:
    """Every setting of the run, defaults included."""

    title = "Configuration"

    def __init__(self, config: ReportPanelConfig) -> None:
        self._config = config

    def render(self, record: RunRecord) -> str | None:
        """None when the run recorded neither settings nor versions."""
        versions = record.summary.get("versions") or {}
        fragments: list[str] = []
        if record.config:
            scalars = {key: value for key, value in record.config.items() if not _is_nested(value)}
            nested = [_section(key, value) for key, value in record.config.items() if _is_nested(value)]
            top = _section("run", scalars) if scalars else ""
            fragments.append(f'<div class="settings">{top}{"".join(nested)}</div>')
        if versions:
            fragments.append(f'<h3>Versions</h3><div class="settings versions">{_entries(versions)}</div>')
        return block(*fragments, wide=True) if fragments else None


def _section(name: str, value: Any) -> str:
    return f"<details open><summary>{text(name)}</summary>{_entries(value)}</details>"


def _entries(value: Any) -> str:
    """A mapping or a list of mappings as nested definition lists."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value, start=1)
    lines = [_section(str(key), item) if _is_nested(item) else _entry(str(key), item) for key, item in pairs]
    return f"<dl>{''.join(lines)}</dl>"


def _entry(key: str, value: Any) -> str:
    css = ' class="unset"' if value is None else ""
    return f"<div><dt>{text(key)}:</dt><dd{css}>{text(_scalar(value))}</dd></div>"


def _is_nested(value: Any) -> bool:
    """Mappings and lists that hold some; a list of plain values is shown on one line."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, (list, tuple)) and any(isinstance(item, (Mapping, list, tuple)) for item in value)


def _scalar(value: Any) -> str:
    """As it would be written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "{}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    return str(value) if value != "" else '""'
