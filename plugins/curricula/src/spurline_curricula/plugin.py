"""Register the components of `curricula`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_curricula.configs import MixtureConfig, SuccessMixtureConfig

PLUGIN = Plugin("curricula", api=API_VERSION, requires=("rl",))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(MixtureConfig, "spurline_curricula.mixture:MixtureOrder")
    registry.add(SuccessMixtureConfig, "spurline_curricula.success_mixture:SuccessMixtureOrder")
