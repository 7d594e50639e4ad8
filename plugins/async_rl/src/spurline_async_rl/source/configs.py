"""Settings of asynchronous rollouts. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from spurline.config.paths import PathSetting
from spurline.config.section import Component, OnResume, Section
from spurline.errors import Problem
from spurline.protocols.source import SourceFacts
from spurline_async_rl.weights.configs import DEFAULT_BUCKET_BYTES
from spurline_models.backend_config import ColocatedEngine
from spurline_rl.configs import PromptSourceConfig
from spurline_rl.protocols.weight_sync import WeightSyncConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class ProofConfig(Section):
    """The proof that each engine generates with the published weights. An engine without this proof is replaced.

    After a publish, every engine answers one fixed request, and the trainer computes the logprobs of the answer itself.
    """

    every: int = Field(default=1, ge=0)
    """Number of publishes from one proof to the next. If it is not 0, the first publish to an engine is always proven.
    0 means no proofs."""
    on_undelivered: Literal["restart", "stop", "warn"] = "restart"
    """Action for an engine that does not have the published weights. `restart` starts the engine again and repeats the
    groups with tokens that it has generated since its last proof. If the new engine lacks the weights too, the run
    ends. `stop` ends the run. `warn` prints a warning. For colocated engines and for engines of other packages,
    `restart` ends the run."""


class AsyncRolloutsConfig(PromptSourceConfig):
    """Generate while the model trains."""

    name: str = "async_rollouts"
    max_staleness: Annotated[int, OnResume.BY_NAME] = Field(default=2, ge=0)
    """Largest age of a trained token, in updates of the model since the weights that generated the token. Each step is
    one update, even if it has several optimizer steps. 0 is synchronous training."""
    max_concurrent_groups: Annotated[int | None, OnResume.FREE] = Field(default=None, gt=0)
    """Groups that run at the same time, at most prompts_per_step x (max_staleness + 1). Few groups finish sooner; many
    keep the engines busier. `spurline simulate` shows the trade-off. null is prompts_per_step if max_staleness is 0,
    and otherwise a quarter of prompts_per_step."""
    depth: Annotated[Literal["auto", "full"] | Annotated[int, Field(gt=0)], OnResume.FREE] = "auto"
    """While the trainer is busy, no group starts if this many groups, finished or running, are untrained. While the
    trainer waits, only max_staleness limits their number. `auto` finds the smallest number that keeps the trainer busy.
    `full` is prompts_per_step x (max_staleness + 1). If training is slower than generation, a smaller depth gives
    fresher tokens."""
    order: Annotated[Literal["fifo", "window"], OnResume.BY_NAME] = "window"
    """`window` lets a finished group overtake slower ones, unless that would make one of them too old. `fifo` trains in
    draw order, so the groups of a batch do not depend on timing."""
    at_bound: Annotated[Literal["wait", "mask"], OnResume.BY_NAME] = "wait"
    """`wait` waits for a slow group that would otherwise get too old. `mask` trains finished groups first. Tokens that
    are too old when their slow group is trained get no loss. `mask` needs order: window."""
    publish_every: Annotated[int, OnResume.BY_NAME] = Field(default=1, gt=0)
    """Steps between two publishes of the weights; at most max_staleness + 1."""
    weight_sync: Annotated[Annotated[WeightSyncConfig, Component("weight_sync")] | None, OnResume.FREE] = None
    """Transport of weights to the engines; null chooses the best transport for the engine."""
    proof: Annotated[ProofConfig, OnResume.FREE] = ProofConfig()
    """Proof that engines generate with the published weights."""
    record_groups: Annotated[bool, OnResume.FREE] = False
    """Keep the trained groups of each step in RUN_DIR/groups. Source `recorded_rollouts` can train on them again."""
    watchdog_s: Annotated[float, OnResume.FREE] = Field(default=300.0, gt=0)
    """After this many seconds without a finished group or answered request, a waiting run reports what it waits for."""
    stall_timeout_s: Annotated[float, OnResume.FREE] = Field(default=7200.0, gt=0)
    """After this many seconds without a finished group or answered request, a waiting run ends with an error."""

    @model_validator(mode="before")
    @classmethod
    def _with_default_engine(cls, values: Any) -> Any:
        """Choose engine `vllm` if it is installed, else `child_process`."""
        if not isinstance(values, dict) or "engine" in values:
            return values
        return {**values, "engine": {"name": "vllm" if find_spec("vllm") else "child_process"}}

    @property
    def groups_at_once(self) -> int:
        """Return how many groups run at the same time."""
        if self.max_concurrent_groups is not None:
            return self.max_concurrent_groups
        return self.prompts_per_step if self.max_staleness == 0 else -(-self.prompts_per_step // 4)

    @property
    def facts(self) -> SourceFacts:
        sync = self.weight_sync
        return replace(
            super().facts,
            transport=None if sync is None else sync.transport,
            engines_elsewhere=self.engine.is_elsewhere,
            update_limit_s=self.engine.update_limit_s,
            sends_adapters=None if sync is None else sync.sends_adapters,
        )

    def colocated_engine(self, run: RunConfig, prompt_tokens: int, context: int | None) -> ColocatedEngine | None:
        if not self.engine.is_colocated:
            return None
        length = self.longest_attempt(prompt_tokens, context)
        bucket = DEFAULT_BUCKET_BYTES if self.weight_sync is None else self.weight_sync.bucket_bytes
        memory = partial(self.engine.colocated_memory, run, self.responses_at_once, length)
        return ColocatedEngine(memory, self.engine.offloads_trainer, self.engine.takes_less, bucket)

    def group_terms(self) -> dict[str, Any]:
        """Return the settings on which generated groups depend, as plain values for a checkpoint."""
        bound = {name: getattr(self, name) for name in ("max_staleness", "order", "at_bound")}
        return {**bound, "sampling": self.sampling.model_dump(mode="json")}

    def may_train_on(self, terms: Mapping[str, Any]) -> bool:
        """Return whether groups that were made under these `group_terms` fit this run's bound and sampling."""
        own = self.group_terms()
        alike = all(terms[name] == own[name] for name in ("order", "at_bound", "sampling"))
        return alike and terms["max_staleness"] <= self.max_staleness

    def describe_bound(self) -> list[str]:
        """Return sentences about the staleness that is guaranteed."""
        bound, most = self.max_staleness, self.prompts_per_step * (self.max_staleness + 1)
        ahead = f"At most {most} groups are ahead of training, and {self.groups_at_once} of them run at a time."
        if bound == 0:
            return [f"Training is synchronous: no update comes between generating a token and training on it. {ahead}"]
        # Colocated engines generate only while the trainer waits, and then depth does not apply.
        if self.depth != "full" and not self.engine.is_colocated:
            fewer = "only as many as it needs" if self.depth == "auto" else f"at most {self.depth}"
            ahead += f" While the trainer is busy, {fewer} are ahead (depth: {self.depth})."
        updates = "1 update" if bound == 1 else f"{bound} updates"
        kept = "All groups are trained before they get older."
        if self.at_bound == "mask":
            kept = "Older tokens of overtaken groups get no loss."
        return [f"No trained token is more than {updates} old. {kept} {ahead}"]

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        most = self.prompts_per_step * (self.max_staleness + 1)
        if self.groups_at_once > most:
            yield Problem(
                "max_concurrent_groups",
                f"is {self.groups_at_once}, but with max_staleness: {self.max_staleness} and prompts_per_step: "
                f"{self.prompts_per_step} no more than {most} groups may be ahead of training. Lower it to {most}.",
            )
        attempts = self.groups_at_once * self.samples_per_prompt
        if attempts > self.max_concurrent:
            yield Problem(
                "max_concurrent",
                f"is {self.max_concurrent}, but {self.groups_at_once} groups of {self.samples_per_prompt} attempts are "
                f"started at a time, so some of them would only wait and get older. Raise it to {attempts}, or lower "
                f"max_concurrent_groups to {max(1, self.max_concurrent // self.samples_per_prompt)}.",
            )
        if self.publish_every > self.max_staleness + 1:
            yield Problem(
                "publish_every",
                f"is {self.publish_every}, so tokens get {self.publish_every - 1} updates old, which is over "
                f"max_staleness: {self.max_staleness}. Set publish_every to at most {self.max_staleness + 1}, or raise "
                f"max_staleness to {self.publish_every - 1}.",
            )
        for name in ("max_staleness", "publish_every") if self.engine.is_colocated else ():
            if (value := getattr(self, name)) > 1:
                yield Problem(
                    name,
                    f"is {value}, but engine.placement is colocated: engines and trainer take turns, and each turn of "
                    "the engines begins with new weights. Set it to 1, or set engine.placement: local.",
                )
        if self.at_bound == "mask" and self.order == "fifo":
            yield Problem(
                "at_bound",
                "is mask, but order is fifo, so no token can get too old. Set order: window, or remove at_bound.",
            )
        if not isinstance(self.depth, str) and not self.prompts_per_step <= self.depth <= most:
            yield Problem(
                "depth",
                f"is {self.depth}, but must be from {self.prompts_per_step} (prompts_per_step) to {most}. Change it, "
                "or set depth: auto.",
            )
        if self.max_staleness > 0 and self.correction is None and not run.loss.uses_rollout_logprobs:
            yield Problem(
                "max_staleness",
                f"is {self.max_staleness}, so tokens come from older weights, but nothing corrects for that: "
                f"loss: {run.loss.name} does not use the logprobs of the rollouts. Set source.correction: tis, which "
                "turns ppo into decoupled PPO, or max_staleness: 0.",
            )
        engines = self.engine.num_engines
        if engines > self.groups_at_once * self.samples_per_prompt:
            yield Problem(
                "engine.engines",
                f"is {engines}, but only {self.groups_at_once} groups of {self.samples_per_prompt} attempts run at a "
                "time. Lower it, or raise max_concurrent_groups.",
            )


class RecordedRolloutsConfig(AsyncRolloutsConfig):
    """Train on the groups that another run has recorded. All settings of `async_rollouts` exist here too."""

    name: str = "recorded_rollouts"
    recorded: Annotated[str, PathSetting(reads=True), OnResume.BY_NAME] = Field(min_length=1)
    """Run directory of a run with `record_groups: true`."""

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, makes_attempts=False)
