"""The contract kit of environments: a suite for tool formats."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.testing.lazy import lazy_names

if TYPE_CHECKING:
    from spurline_environments.testing.tool_format_contract import ToolFormatContract as ToolFormatContract

_NAMES = {"tool_format_contract": ("ToolFormatContract",)}

__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
