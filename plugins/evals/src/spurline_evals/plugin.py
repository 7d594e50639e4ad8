"""Register the components of `evals`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, Plugin

PLUGIN = Plugin("evals", api=API_VERSION)
