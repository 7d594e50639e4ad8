"""Register the components of `objectives`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_objectives.configs import (
    DppoConfig,
    EntropyTargetConfig,
    GdpoConfig,
    KpopConfig,
    PpoPerRowConfig,
    TurnGrpoConfig,
)

PLUGIN = Plugin("objectives", api=API_VERSION, requires=("rl",))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(DppoConfig, "spurline_objectives.trust_regions:Dppo")
    registry.add(PpoPerRowConfig, "spurline_objectives.trust_regions:PpoPerRow")
    registry.add(EntropyTargetConfig, "spurline_objectives.entropy_target:EntropyTarget")
    registry.add(KpopConfig, "spurline_objectives.trust_regions:Kpop")
    registry.add(GdpoConfig, "spurline_objectives.advantages:Gdpo")
    registry.add(TurnGrpoConfig, "spurline_objectives.advantages:TurnGrpo")
