"""Declare a plugin: `PLUGIN = Plugin(...)`, the decorators of its hooks, and the registrar of its components."""

from spurline.plugins.hookspecs import hookimpl, hookspec
from spurline.plugins.host import API_VERSION, Plugin
from spurline.plugins.registry import ComponentRegistrar

__all__ = ["API_VERSION", "ComponentRegistrar", "Plugin", "hookimpl", "hookspec"]
