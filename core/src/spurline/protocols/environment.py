"""Kind `environment`: turn a prompt and a policy into a rewarded trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from spurline.protocols.rollout_engine import GenerationRequest, GenerationResult
    from spurline.rl.trajectory import Trajectory


class PolicyHandle(Protocol):
    """What an environment talks to: tokens in, tokens out."""

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """One model call. The seed is derived by the handle, not by the environment."""
        ...


class Environment(Protocol):
    """Run one attempt at a prompt.

    Factory: `Class(config, tokenizer=PreTrainedTokenizerBase)`.
    """

    async def run(self, row: Mapping[str, Any], uid: str, sample: int, policy: PolicyHandle) -> Trajectory:
        """A trajectory with reward terms. An exception is retried, then the trajectory is quarantined with it."""
        ...
