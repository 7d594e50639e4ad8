"""Register the backend `megatron`."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_megatron_backend.configs import MegatronBackendConfig

PLUGIN = Plugin("megatron_backend", api=API_VERSION, requires=("models", "ranks"))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(MegatronBackendConfig, "spurline_ranks.backend:RankBackend")
