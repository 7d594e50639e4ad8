"""The contract kit of RL: suites for rewards, environments, advantages, corrections, engines, collators and orders.

The suite for backends is here too, because it tests the training of policies and critics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.testing.lazy import lazy_names

if TYPE_CHECKING:
    from spurline_rl.testing.advantage_contract import AdvantageContract as AdvantageContract
    from spurline_rl.testing.backend_contract import BackendContract as BackendContract
    from spurline_rl.testing.collator_contract import RolloutCollatorContract as RolloutCollatorContract
    from spurline_rl.testing.correction_contract import CorrectionContract as CorrectionContract
    from spurline_rl.testing.engine_update_contract import EngineUpdateContract as EngineUpdateContract
    from spurline_rl.testing.environment_contract import EnvironmentContract as EnvironmentContract
    from spurline_rl.testing.inputs import make_trajectories as make_trajectories
    from spurline_rl.testing.order_contract import AdaptiveOrderContract as AdaptiveOrderContract
    from spurline_rl.testing.reward_contract import RewardContract as RewardContract
    from spurline_rl.testing.rollout_engine_contract import RolloutEngineContract as RolloutEngineContract

_NAMES = {
    "backend_contract": ("BackendContract",),
    "advantage_contract": ("AdvantageContract",),
    "collator_contract": ("RolloutCollatorContract",),
    "correction_contract": ("CorrectionContract",),
    "engine_update_contract": ("EngineUpdateContract",),
    "environment_contract": ("EnvironmentContract",),
    "inputs": ("make_trajectories",),
    "order_contract": ("AdaptiveOrderContract",),
    "reward_contract": ("RewardContract",),
    "rollout_engine_contract": ("RolloutEngineContract",),
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
