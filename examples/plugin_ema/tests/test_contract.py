"""The contract that Spurline ships for every plugin, applied to this one."""

from __future__ import annotations

from spurline.testing import PluginContract


class TestPlugin(PluginContract):
    plugin_module = "spurline_plugin_ema.plugin"
