"""Register the components of `evals`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_evals.configs import LmEvalConfig

PLUGIN = Plugin("evals", api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(LmEvalConfig, "spurline_evals.evaluation:LmEvalEvaluation")
