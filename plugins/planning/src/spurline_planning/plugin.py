"""Declare the plugin. It has only commands, which are entry points of the package."""

from __future__ import annotations

from spurline.plugins import API_VERSION, Plugin

PLUGIN = Plugin("planning", api=API_VERSION)
