"""Register the fast data components, which are the defaults while the plugin is enabled."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_collation_fast import configs

PLUGIN = Plugin("collation_fast", api=API_VERSION, requires=("text", "rl"))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    add, package = registry.add, "spurline_collation_fast"
    add(configs.FastPaddedCollatorConfig, f"{package}.collators:FastPaddedCollator", replaces_builtin=True)
    add(
        configs.FastPackedCollatorConfig, f"{package}.collators:FastPackedCollator", replaces_builtin=True, default=True
    )
    add(configs.FastRolloutsCollatorConfig, f"{package}.collators:FastRolloutsCollator", replaces_builtin=True)
    add(configs.ParallelTokenizationConfig, f"{package}.tokenization.parallel:ParallelTokenization", default=True)
    add(configs.AsyncPrefetchConfig, f"{package}.prefetch:AsyncPrefetch", default=True)
