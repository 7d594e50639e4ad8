"""Offer the contract kit for report panels; see `spurline.testing` for how to use a suite."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.testing.lazy import lazy_names

if TYPE_CHECKING:
    from spurline_insight.testing.report_panel_contract import ReportPanelContract as ReportPanelContract

_NAMES = {"report_panel_contract": ("ReportPanelContract",)}

__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]

__doc__ = f"{__doc__}\nSuites: {', '.join(name for name in __all__ if name.endswith('Contract'))}."
