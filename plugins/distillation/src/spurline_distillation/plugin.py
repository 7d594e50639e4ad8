"""Register the components of `distillation`. This module imports neither torch nor transformers."""

from __future__ import annotations

from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline_distillation import configs

PLUGIN = Plugin("distillation", api=API_VERSION, requires=("rl",))


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add(configs.DistillationConfig, "spurline_distillation.loss:Distillation")
    registry.add(configs.TeacherAdvantageConfig, "spurline_distillation.advantage:TeacherAdvantage")
    registry.add(configs.ServedTeacherConfig, "spurline_distillation.served:ServedTeacher")
    registry.add(configs.PrivilegedPromptConfig, "spurline_distillation.privileged:PrivilegedPrompt")
