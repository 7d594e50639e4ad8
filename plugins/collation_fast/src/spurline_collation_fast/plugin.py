"""Register the fast data components and make them the defaults while the plugin is enabled."""

from __future__ import annotations

from spurline.hookspecs import hookimpl
from spurline.plugins import API_VERSION, Plugin
from spurline.registry import ComponentRegistrar
from spurline_collation_fast import configs

PLUGIN = Plugin("collation_fast", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    package = "spurline_collation_fast"
    registry.add(
        "collator",
        "padded",
        config=configs.FastPaddedCollatorConfig,
        factory=f"{package}.padded_collator:FastPaddedCollator",
        replaces_builtin=True,
    )
    registry.add(
        "collator",
        "packed",
        config=configs.FastPackedCollatorConfig,
        factory=f"{package}.packed_collator:FastPackedCollator",
        replaces_builtin=True,
        default=True,
    )
    registry.add(
        "collator",
        "rollouts",
        config=configs.FastRolloutsCollatorConfig,
        factory=f"{package}.rollouts_collator:FastRolloutsCollator",
        replaces_builtin=True,
    )
    registry.add(
        "tokenization",
        "parallel",
        config=configs.ParallelTokenizationConfig,
        factory=f"{package}.parallel_tokenization:ParallelTokenization",
        default=True,
    )
    registry.add(
        "prefetch",
        "async",
        config=configs.AsyncPrefetchConfig,
        factory=f"{package}.async_prefetch:AsyncPrefetch",
        default=True,
    )
    registry.add(
        "report_panel",
        "collation",
        config=configs.CollationPanelConfig,
        factory=f"{package}.collation_panel:CollationPanel",
    )
