"""Register the components of `reward_models`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, Plugin

PLUGIN = Plugin("reward_models", api=API_VERSION, requires=("preference", "rl"))
