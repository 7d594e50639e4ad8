"""The plugins of this project: those loaded by default, and what the others bring, so that a message can name one.

A plugin that is not listed is never imported, so what it has must be known without it; a test compares this table with
the plugins. Of other people's plugins nothing is known here, nor how to install them.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

DEFAULT_PLUGINS = ("text", "models", "preference", "rl", "insight", "planning", "trackers")
"""Plugins that are loaded where they are installed, before those that a config lists, unless it lists `-NAME`."""

OFFICIAL: Mapping[str, tuple[str, ...]] = {
    "async_rl": (
        "source/async_rollouts",
        "source/recorded_rollouts",
        "rollout_engine/child_process",
        "rollout_engine/vllm",
        "environment/harness",
        "weight_sync/in_process",
        "weight_sync/shared_memory",
        "weight_sync/disk",
        "weight_sync/collective",
        "weight_sync/nccl",
        "weight_sync/cuda_ipc",
        "report_panel/rollout_timeline",
        "report_panel/staleness",
        "report_panel/controller",
    ),
    "collation_fast": ("tokenization/parallel", "prefetch/async", "report_panel/collation"),
    "fsdp_backend": ("backend/fsdp",),
    "megatron_backend": ("backend/megatron",),
}
"""Plugin -> KIND/NAME of each component that core has none of the same name for. For messages alone."""


def plugin_with(kind: str | None, component: str) -> str | None:
    """The plugin of this project that has a component of this name; of any kind where `kind` is None."""
    for plugin, entries in OFFICIAL.items():
        found = [entry.partition("/")[0] for entry in entries if entry.endswith(f"/{component}")]
        if found if kind is None else kind in found:
            return plugin
    return None


def install_command(plugin: str) -> str:
    """Return how to install a plugin of this project: from the checkout that core came from, where that is there."""
    origin: str = json.loads(importlib.metadata.distribution("spurline").read_text("direct_url.json") or "{}").get(
        "url", ""
    )
    folder = Path(unquote(urlsplit(origin).path)).parent / "plugins" / plugin
    is_there = origin.startswith("file:") and folder.is_dir()
    return f"pip install {shlex.quote(str(folder))}" if is_there else f"pip install spurline-{plugin.replace('_', '-')}"
