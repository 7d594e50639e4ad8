"""The names that a plugin imports to declare itself, its hooks and its components."""

from spurline.plugins.hookspecs import hookimpl, hookspec
from spurline.plugins.host import API_VERSION, Plugin
from spurline.plugins.registry import ComponentRegistrar

__all__ = ["API_VERSION", "ComponentRegistrar", "Plugin", "hookimpl", "hookspec"]
