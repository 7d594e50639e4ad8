"""Check that a plugin imports no heavy library, that its declaration and components load, and that trackers work."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from spurline.config.loading import config_model
from spurline.config.section import ComponentConfig
from spurline.plugins.host import (
    API_VERSION,
    InstalledPlugin,
    Plugin,
    PluginHost,
    declared_components,
    installed_plugins,
)
from spurline.plugins.registry import resolve
from spurline.protocols.tracker import RunInfo, Tracker

HEAVY = ("torch", "transformers", "ray", "vllm", "megatron")


class PluginContract:
    """A suite of tests for plugins. Write a subclass with `plugin_module`, the dotted name of your plugin's module.

    `requires` has the names of plugins to load before yours.
    """

    plugin_module: str
    requires: Sequence[str] = ()

    def declaration(self) -> Plugin:
        return importlib.import_module(self.plugin_module).PLUGIN

    def load(self) -> PluginHost:
        """Return a host with this plugin enabled, even if its distribution is not installed."""
        name = self.declaration().name
        known = installed_plugins()
        known.setdefault(name, InstalledPlugin(name, self.plugin_module, "distribution-under-test", "0"))
        return PluginHost.load([*self.requires, name], known)

    def test_importing_the_plugin_loads_no_heavy_library(self) -> None:
        code = f"import sys, {self.plugin_module}; print([m for m in {HEAVY!r} if m in sys.modules])"
        # The child process searches the same folders for modules as this one, so the plugin need not be installed.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        result = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == "[]", f"{self.plugin_module} imports {result.stdout.strip()} at load"

    def test_plugin_is_declared_for_this_interface_and_loads(self) -> None:
        declaration = self.declaration()
        assert (type(declaration), declaration.api) == (Plugin, API_VERSION)
        assert declaration.name in self.load().plugins

    def test_components_that_the_metadata_declares_are_registered(self) -> None:
        host, name = self.load(), self.declaration().name
        sections = [f"section/{key}" for key, section in host.registry.sections.items() if section.plugin == name]
        components = [f"{entry.kind}/{entry.name}" for entry in host.registry.entries(name)]
        assert {*declared_components().get(name, ())} <= {*sections, *components}

    def test_every_component_resolves_to_a_factory(self) -> None:
        for entry in self.load().registry.entries(self.declaration().name):
            assert callable(resolve(entry.factory, f"{entry.kind} '{entry.name}'"))

    def test_every_setting_is_described(self) -> None:
        declaration = self.declaration()
        sections = [entry.config for entry in self.load().registry.entries(declaration.name)]
        for section in [*sections, *([declaration.config] if declaration.config else [])]:
            for name, field in section.model_fields.items():
                described = field.description or name in ComponentConfig.model_fields
                assert described, f"{section.__name__}.{name} has no docstring"

    def test_the_config_model_can_be_built(self) -> None:
        assert config_model(self.load()).model_json_schema()["properties"]


class TrackerContract:
    """A suite of tests for trackers. Write a subclass with `make_tracker()`."""

    def make_tracker(self) -> Tracker:
        """Return your tracker."""
        raise NotImplementedError("subclass TrackerContract with make_tracker(self)")

    def test_a_run_can_be_tracked_resumed_and_closed_twice_or_without_a_start(self, tmp_path: Path) -> None:
        for resume_step in (0, 3):
            tracker = self.make_tracker()
            tracker.start(RunInfo(tmp_path, resume_step, 5, {"seed": 0}, ("a note",)))
            for step in range(resume_step + 1, 6):
                tracker.log(step, {"loss": 1.0 / step, "tokens": 10.0, "time/step": 0.1, "lr": 1e-4})
            tracker.flush()
            tracker.close()
            tracker.close()
        self.make_tracker().close()
