"""Declare the plugin. Its commands are entry points of the package, and it registers no components."""

from __future__ import annotations

from spurline.plugins import API_VERSION, Plugin

PLUGIN = Plugin("planning", api=API_VERSION)
