"""Register the components of `curricula`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, Plugin

PLUGIN = Plugin("curricula", api=API_VERSION, requires=("rl",))
