"""Declare the plugin `simulation`, whose only part is the command `spurline simulate`."""

from __future__ import annotations

from spurline.plugins import API_VERSION, Plugin

PLUGIN = Plugin("simulation", api=API_VERSION)
