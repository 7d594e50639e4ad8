"""What every source of rollouts shares: prompts in order, attempts at them, and batches made of their groups.

Place on the way: config and data -> this, which a source derives from to say when groups are generated and which of
them make a batch. Nothing here generates by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from spurline.builtin.rollouts.attempts import Attempts
from spurline.builtin.rollouts.draws import Draw, PromptDraws
from spurline.builtin.rollouts.group_collection import Collected
from spurline.builtin.rollouts.health import length_metrics, reward_metrics
from spurline.builtin.rollouts.held_out import RolloutEvaluation
from spurline.builtin.rollouts.preparation import Preparation
from spurline.data.batch import TrainingBatch
from spurline.errors import CheckpointError
from spurline.protocols.backend import Backend
from spurline.protocols.evaluation import HeldOutEvaluation
from spurline.protocols.source_config import PromptSourceConfig
from spurline.rl.group_runner import Outcome
from spurline.rl.turns import turns_of
from spurline.run_context import SourceContext


class PromptSource(ABC):
    """Base of sources whose batches are groups of scored attempts."""

    pure = False

    def __init__(self, config: PromptSourceConfig, context: SourceContext) -> None:
        run = context.config
        self._hooks = context.host.hooks
        self._prompts = PromptDraws.open(run.data.train, context, shuffle=run.data.shuffle)
        self._held_out: PromptDraws | None = None
        if run.data.eval:
            self._held_out = PromptDraws.open(run.data.eval, context, shuffle=False, namespace="held-out ")
        self._preparation = Preparation(config, context)
        self._attempts = Attempts(config, context)
        self._settings = config
        self.total_steps = run.total_steps(self._prompts.prompts_per_epoch, config.prompts_per_step)

    def summary(self) -> Mapping[str, object]:
        config = self._settings
        return {
            **self._prompts.summary(),
            "samples_per_epoch": self._prompts.prompts_per_epoch,
            "samples_per_step": config.prompts_per_step,
            "step_of": f"{config.prompts_per_step} prompts x {config.samples_per_prompt} attempts",
            "objective": self._preparation.describe(),
        }

    def evaluation(self) -> HeldOutEvaluation:
        """Attempts at the held-out prompts with the weights as they are."""
        assert self._held_out is not None, "there is no held-out data"
        return RolloutEvaluation(self._settings.held_out, self._held_out, self._run_held_out)

    def given_up(self) -> Sequence[str]:
        return [group.reason for group in self._attempts.quarantine.groups]

    @abstractmethod
    def _run_held_out(self, prompts: Sequence[Draw]) -> Sequence[Outcome]:
        """Make attempts at held-out prompts and wait for them."""

    def _batch(
        self, step: int, collected: Collected, backend: Backend, *, retries: int, seconds: float
    ) -> TrainingBatch:
        """The batch of a step from its groups. retries: attempts made again for them. seconds: spent on generating."""
        self._hooks.on_rollouts_scored(step=step, groups=collected.groups)
        batch = self._preparation.prepare(collected.groups, backend).batch
        metrics = {
            **_collection_metrics(collected, retries, seconds),
            **reward_metrics(collected.every),
            **length_metrics(collected.every),
        }
        return replace(batch, info={**batch.info, **metrics})

    def _prompts_state(self) -> dict[str, object]:
        """What a checkpoint holds of the prompts and of those given up."""
        return {
            "data": self._prompts.fingerprint(),
            "prompts": self._prompts.state_dict(),
            "quarantine": self._attempts.quarantine.state_dict(),
        }

    def _load_prompts_state(self, state: Mapping[str, object]) -> None:
        """Raises CheckpointError when the data is not what the checkpoint was trained on."""
        if state.get("data") != self._prompts.fingerprint():
            raise CheckpointError(
                "The prompts are not those the checkpoint was trained on: a file changed. Restore it, or start anew "
                "with another run_dir."
            )
        quarantine, prompts = state["quarantine"], state["prompts"]
        assert isinstance(quarantine, Mapping), quarantine
        assert isinstance(prompts, Mapping), prompts
        self._attempts.quarantine.load_state_dict(quarantine)
        self._prompts.load_state_dict(prompts)


def _collection_metrics(collected: Collected, retries: int, seconds: float) -> dict[str, float]:
    """What generating cost, and what became of the prompts that were drawn."""
    tokens = sum(len(turn.response_ids) for turn in turns_of(collected.every))
    return {
        "time/generate": seconds,
        "rollout/tokens": float(tokens),
        "groups/drawn": float(len(collected.every) + collected.quarantined),
        "groups/filtered": float(len(collected.every) - len(collected.groups)),
        "groups/quarantined": float(collected.quarantined),
        "groups/skipped_rows": float(collected.skipped),
        "groups/retries": float(retries),
        "groups/refill_missing": float(collected.refill_missing),
    }
