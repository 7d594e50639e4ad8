"""What the plugins of this project bring, so that a message can name the one that is missing.

A plugin that is not listed is never imported, so what it has must be known without it; a test compares this table with
the plugins. Of other people's plugins nothing is known here, nor how to install them.
"""

from __future__ import annotations

from collections.abc import Mapping

OFFICIAL: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "async_rl": {
        "source": ("async_rollouts", "recorded_rollouts"),
        "rollout_engine": ("child_process", "vllm"),
        "environment": ("harness",),
        "weight_sync": ("in_process", "shared_memory", "disk", "collective", "nccl", "cuda_ipc"),
        "report_panel": ("rollout_timeline", "staleness", "controller"),
    },
    "collation_fast": {"tokenization": ("parallel",), "prefetch": ("async",), "report_panel": ("collation",)},
    "fsdp_backend": {"backend": ("fsdp",)},
    "megatron_backend": {"backend": ("megatron",)},
}
"""Plugin -> kind -> the components that core has none of the same name for."""


def plugin_with(kind: str | None, component: str) -> str | None:
    """The plugin of this project that has a component of this name; of any kind where `kind` is None."""
    for plugin, kinds in OFFICIAL.items():
        if any(component in names for of_kind, names in kinds.items() if kind in (None, of_kind)):
            return plugin
    return None


def install_command(plugin: str) -> str:
    """How to install a plugin of this project."""
    return f"pip install spurline-{plugin.replace('_', '-')}"
