"""Apply Spurline's contract for plugins to this plugin."""

from __future__ import annotations

from spurline.testing import PluginContract


class TestPlugin(PluginContract):
    plugin_module = "spurline_plugin_ema.plugin"
