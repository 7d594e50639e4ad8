"""Declare the plugin, and start an average for each run. Spurline loads this module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.plugins import Plugin, hookimpl
from spurline_plugin_ema.config import EmaConfig

if TYPE_CHECKING:
    from spurline import Run

PLUGIN = Plugin("ema", api=2, config=EmaConfig)


@hookimpl
def on_run_start(run: Run) -> None:
    # This module is loaded to validate a config, so it must not import torch at its top.
    from spurline_plugin_ema.average import Average

    average = Average(run, getattr(run.config, PLUGIN.name))
    run.keep_state("weights", average)
    run.loaded.host.attach(average, "ema/average")
