"""Register the backend `fsdp`."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_fsdp_backend.configs import FsdpBackendConfig

PLUGIN = Plugin("fsdp_backend", api=API_VERSION, requires=("models", "ranks"))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(FsdpBackendConfig, "spurline_fsdp_backend.backend:FsdpBackend")
