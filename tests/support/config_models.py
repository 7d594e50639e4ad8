"""Config models that are made once for all runs of the tests."""

from __future__ import annotations

from collections.abc import Mapping

from spurline.config import loading
from spurline.config.assembly import assemble
from spurline.config.run_config import RunConfig
from spurline.config.section import Section
from spurline.plugins.host import PluginHost
from spurline.plugins.registry import Registry

MODELS: dict[tuple[object, ...], type[RunConfig]] = {}
"""Config models by the components and sections they are made of."""

OFTEN = ([], ["fsdp_backend"], ["megatron_backend"], ["fsdp_backend", "megatron_backend"], ["async_rl"])
"""The plugins of most runs whose ranks, engines and commands are processes of their own."""


def assemble_once(registry: Registry, sections: Mapping[str, type[Section]]) -> type[RunConfig]:
    """A process of the product makes one config model; the tests would make a thousand equal ones."""
    key = (*registry.entries(), *sections.items(), *((name, each.optional) for name, each in registry.sections.items()))
    if key not in MODELS:
        MODELS[key] = assemble(registry, sections)
    return MODELS[key]


def make_those_of_most_runs() -> None:
    loading.assemble = assemble_once
    for plugins in OFTEN:
        loading.config_model(PluginHost.load(plugins))
