"""The contract kit that ships to plugin authors: subclass a suite, provide your component, run pytest.

    from spurline.testing import CollatorContract

    class TestMyCollator(CollatorContract):
        def make_collator(self, pad_token_id, layout):
            return MyCollator(MyConfig(), pad_token_id=pad_token_id, layout=layout)

Names are imported on first use, so that importing this package in a conftest costs nothing. Each suite's docstring says
what a subclass provides, and which attributes it may set.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spurline.testing.adapter_contract import AdapterContract as AdapterContract
    from spurline.testing.advantage_contract import AdvantageContract as AdvantageContract
    from spurline.testing.backend_contract import BackendContract as BackendContract
    from spurline.testing.collator_contract import CollatorContract as CollatorContract
    from spurline.testing.collator_contract import RolloutCollatorContract as RolloutCollatorContract
    from spurline.testing.dataset_contract import DatasetContract as DatasetContract
    from spurline.testing.engine_update_contract import EngineUpdateContract as EngineUpdateContract
    from spurline.testing.environment_contract import EnvironmentContract as EnvironmentContract
    from spurline.testing.inputs import make_store as make_store
    from spurline.testing.inputs import make_trajectories as make_trajectories
    from spurline.testing.inputs import write_tiny_model as write_tiny_model
    from spurline.testing.inputs import write_tiny_moe_model as write_tiny_moe_model
    from spurline.testing.loss_contract import CorrectionContract as CorrectionContract
    from spurline.testing.loss_contract import LossContract as LossContract
    from spurline.testing.loss_contract import MiniBatchesContract as MiniBatchesContract
    from spurline.testing.optimizer_contract import OptimizerContract as OptimizerContract
    from spurline.testing.optimizer_contract import ScheduleContract as ScheduleContract
    from spurline.testing.order_contract import OrderContract as OrderContract
    from spurline.testing.plugin_contract import PluginContract as PluginContract
    from spurline.testing.plugin_contract import ReportPanelContract as ReportPanelContract
    from spurline.testing.plugin_contract import TrackerContract as TrackerContract
    from spurline.testing.prefetch_contract import PrefetchContract as PrefetchContract
    from spurline.testing.reward_contract import RewardContract as RewardContract
    from spurline.testing.rollout_engine_contract import RolloutEngineContract as RolloutEngineContract
    from spurline.testing.source_contract import SourceContract as SourceContract
    from spurline.testing.tokenization_contract import TokenizationContract as TokenizationContract

_NAMES = {
    "adapter_contract": ("AdapterContract",),
    "advantage_contract": ("AdvantageContract",),
    "backend_contract": ("BackendContract",),
    "collator_contract": ("CollatorContract", "RolloutCollatorContract"),
    "dataset_contract": ("DatasetContract",),
    "engine_update_contract": ("EngineUpdateContract",),
    "environment_contract": ("EnvironmentContract",),
    "inputs": ("make_store", "make_trajectories", "write_tiny_model", "write_tiny_moe_model"),
    "loss_contract": ("CorrectionContract", "LossContract", "MiniBatchesContract"),
    "optimizer_contract": ("OptimizerContract", "ScheduleContract"),
    "order_contract": ("OrderContract",),
    "plugin_contract": ("PluginContract", "ReportPanelContract", "TrackerContract"),
    "prefetch_contract": ("PrefetchContract",),
    "reward_contract": ("RewardContract",),
    "rollout_engine_contract": ("RolloutEngineContract",),
    "source_contract": ("SourceContract",),
    "tokenization_contract": ("TokenizationContract",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)  # pyright: ignore[reportUnsupportedDunderAll]

__doc__ = f"{__doc__}\nSuites: {', '.join(name for name in __all__ if name.endswith('Contract'))}."


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'spurline.testing' has no attribute '{name}'")
    return getattr(importlib.import_module(f"spurline.testing.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    # `help(spurline.testing)` documents what it finds here.
    return sorted({*globals(), *_HOMES})
