"""What panels of the report show, taken apart."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from spurline.plugins.host import PluginHost
from spurline.plugins.registry import resolve
from spurline_insight.report_panel import ReportPanelConfig, RunRecord

PANELS = {
    entry.factory.rpartition(":")[2]: resolve(entry.factory, entry.name)
    for entry in PluginHost.load([]).registry.entries()
    if entry.kind == "report_panel"
}
"""Each panel of the packages that are loaded by default, by the name of its class."""


def rendered(name: str, record: RunRecord) -> str | None:
    return PANELS[name](ReportPanelConfig(name=name)).render(record)


def shown(name: str, record: RunRecord) -> str:
    fragment = rendered(name, record)
    assert fragment is not None
    return fragment


def figures(fragment: str) -> list[dict[str, Any]]:
    # A browser reads no NaN.
    return [
        json.loads(content, parse_constant=pytest.fail)
        for content in re.findall(r'class="figure">(.*?)</script>', fragment)
    ]


def traces(fragment: str) -> dict[str, dict[str, Any]]:
    """Traces of all plots by name."""
    return {trace["name"]: trace for plot in figures(fragment) for trace in plot["data"]}


def times(fragment: str) -> dict[str, str]:
    """What `TimeSplitPanel` lists, by name."""
    return dict(re.findall(r'class="label">(.*?)</span>.*?class="amount">(.*?)</span>', fragment))
