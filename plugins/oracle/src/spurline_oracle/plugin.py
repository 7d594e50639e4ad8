"""Declare the plugin `oracle`, whose only part is the command `spurline check-gradients`."""

from __future__ import annotations

from spurline.plugins import API_VERSION, Plugin

PLUGIN = Plugin("oracle", api=API_VERSION, requires=("models",))
