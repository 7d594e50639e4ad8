"""Register the components of `objectives`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, Plugin

PLUGIN = Plugin("objectives", api=API_VERSION, requires=("rl",))
