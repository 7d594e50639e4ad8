"""Write the first lines of a run to stderr: a banner with its settings, and a line when each slow piece of work begins.

The banner appears before torch is imported, so this module imports nothing heavy.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping

from spurline.config.loading import LoadedConfig
from spurline.config.paths import shown_path
from spurline.plugins.registry import CORE
from spurline.protocols.dataset import DatasetConfig

_WIDTH = 8


def banner(loaded: LoadedConfig) -> list[str]:
    """Return lines with the settings that a person checks when a run starts."""
    config, plugins = loaded.config, loaded.host.plugins
    model = config.model
    # Default plugins are not listed, since they are in every run.
    enabled = [f"{name} {plugins[name].version}" if name in plugins else name for name in config.plugins]
    adapted = ", adapters" if config.backend.facts.trains_adapters else ""
    held_out = f"; held out: {_places(config.data.eval)}" if config.data.eval else ""
    facts: Mapping[str, str] = {
        "run": f"{loaded.origin} -> {config.run_dir}",
        "model": f"{shown_path(model.path)}{' (random weights)' if model.init == 'random' else ''}{adapted}",
        "data": f"{_places(config.data.train)}{held_out}",
        "training": f"source {config.source.name}, loss {config.loss.name}",
        "device": f"backend {config.backend.name} {config.backend.facts.device}".rstrip(),
        "plugins": ", ".join(enabled) or "none",
    }
    return [f"spurline {plugins[CORE].version}", *(f"  {name:{_WIDTH}} {text}" for name, text in facts.items())]


def _places(datasets: Iterable[DatasetConfig]) -> str:
    return ", ".join(shown_path(entry.place) for entry in datasets)


class StartLines:
    """A `Progress` that prints lines on stderr, with the seconds since the start. If `quiet`, nothing is written."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._began = time.monotonic()

    def show(self, lines: list[str]) -> None:
        if not self._quiet:
            # Flush the lines, since the next import may take seconds.
            print("\n".join(lines), file=sys.stderr, flush=True)

    def __call__(self, text: str) -> None:
        self.show([f"  [{time.monotonic() - self._began:5.1f} s] {text}"])
