"""Settings of asynchronous rollouts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from spurline.config.paths import PathSetting
from spurline.config.section import Component, OnResume
from spurline.errors import Problem
from spurline.protocols.source import SourceFacts
from spurline_async_rl.weights.configs import DEFAULT_BUCKET_BYTES
from spurline_models.backend_config import ColocatedEngine
from spurline_rl.configs import PromptSourceConfig
from spurline_rl.protocols.weight_sync import WeightSyncConfig

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class AsyncRolloutsConfig(PromptSourceConfig):
    """Generate while the model trains."""

    name: str = "async_rollouts"
    max_staleness: Annotated[int, OnResume.BY_NAME] = Field(default=2, ge=0)
    """Most updates of the model between the weights that wrote a token and the weights that are trained on it. A step
    is one update, however many optimizer steps it has. 0 is synchronous training."""
    max_concurrent_groups: Annotated[int | None, OnResume.FREE] = Field(default=None, gt=0)
    """Groups under way at the same time, at most prompts_per_step x (max_staleness + 1). Few groups are each finished
    sooner; many keep the engines busier; `spurline simulate` shows the trade. null is prompts_per_step with
    max_staleness 0, and a quarter of it otherwise."""
    depth: Annotated[Literal["auto", "full"] | Annotated[int, Field(gt=0)], OnResume.FREE] = "auto"
    """Untrained groups, finished and under way, up to which further ones start while the trainer is busy. Only
    max_staleness limits them while it waits. `auto` is as few as keep the trainer busy; `full` is as many as
    max_staleness allows, prompts_per_step x (max_staleness + 1). Fewer are fresher where training is slower."""
    order: Annotated[Literal["fifo", "window"], OnResume.BY_NAME] = "window"
    """`window` trains on finished groups, which overtake others only where that makes none too old. `fifo` trains in
    the order of the draws, so that the groups of a batch do not depend on time."""
    at_bound: Annotated[Literal["wait", "mask"], OnResume.BY_NAME] = "wait"
    """`wait` waits for groups that would get too old if finished ones were trained first. `mask` trains these first;
    tokens of the others that get too old have no loss and are counted. `mask` needs order: window."""
    publish_every: Annotated[int, OnResume.BY_NAME] = Field(default=1, gt=0)
    """Steps between two publishes of the weights; at most max_staleness + 1."""
    weight_sync: Annotated[Annotated[WeightSyncConfig, Component("weight_sync")] | None, OnResume.FREE] = None
    """Transport of weights to the engines; null takes the best one that the engine reads."""
    record_groups: Annotated[bool, OnResume.FREE] = False
    """Keep the groups that each step trained on in RUN_DIR/groups; source `recorded_rollouts` trains on them again."""
    watchdog_s: Annotated[float, OnResume.FREE] = Field(default=300.0, gt=0)
    """Seconds without a finished group after which a waiting run says who holds what."""
    stall_timeout_s: Annotated[float, OnResume.FREE] = Field(default=7200.0, gt=0)
    """Seconds without a finished group after which a waiting run ends."""

    @model_validator(mode="before")
    @classmethod
    def _with_default_engine(cls, values: Any) -> Any:
        """Choose vLLM where it is installed, else the Hugging Face model in processes of its own."""
        if not isinstance(values, dict) or "engine" in values:
            return values
        return {**values, "engine": {"name": "vllm" if find_spec("vllm") else "child_process"}}

    @property
    def groups_at_once(self) -> int:
        """Groups under way at the same time."""
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
        """Return the settings that a finished group was made under, as plain values for a checkpoint."""
        bound = {name: getattr(self, name) for name in ("max_staleness", "order", "at_bound")}
        return {**bound, "sampling": self.sampling.model_dump(mode="json")}

    def may_train_on(self, terms: Mapping[str, Any]) -> bool:
        """Return whether groups made under these `group_terms` keep this run's bound and its sampling."""
        own = self.group_terms()
        alike = all(terms[name] == own[name] for name in ("order", "at_bound", "sampling"))
        return alike and terms["max_staleness"] <= self.max_staleness

    def describe_bound(self) -> list[str]:
        """Return sentences on the guaranteed bound."""
        bound, most = self.max_staleness, self.prompts_per_step * (self.max_staleness + 1)
        ahead = f"At most {most} groups are ahead of training, {self.groups_at_once} of them under way at a time."
        if bound == 0:
            return [f"Every token is generated with the weights that are trained on it: synchronous. {ahead}"]
        # Colocated engines generate only while the trainer is not busy, when depth holds nothing back.
        if self.depth != "full" and not self.engine.is_colocated:
            fewer = "as few as it needs" if self.depth == "auto" else f"at most {self.depth}"
            ahead += f" While the trainer is busy, {fewer} (depth: {self.depth})."
        updates = "1 update" if bound == 1 else f"{bound} updates"
        kept = "groups are trained on before they get older, and none is dropped"
        if self.at_bound == "mask":
            kept = "older tokens of overtaken groups get no loss"
        return [f"No token is trained on that is more than {updates} old: {kept}. {ahead}"]

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
                f"under way at a time, so that most of them would only wait and get older. Raise it to {attempts}, or "
                f"lower max_concurrent_groups to {max(1, self.max_concurrent // self.samples_per_prompt)}.",
            )
        if self.publish_every > self.max_staleness + 1:
            yield Problem(
                "publish_every",
                f"is {self.publish_every}: the last of {self.publish_every} steps trains on tokens of weights that are "
                f"{self.publish_every - 1} updates old, over max_staleness: {self.max_staleness}. Set publish_every to "
                f"at most {self.max_staleness + 1}, or raise max_staleness to {self.publish_every - 1}.",
            )
        for name in ("max_staleness", "publish_every") if self.engine.is_colocated else ():
            if (value := getattr(self, name)) > 1:
                yield Problem(
                    name,
                    f"is {value}, but with engine.placement: colocated engines and trainer take turns, and each turn "
                    "of the engines begins with new weights. Set it to 1, or placement: local.",
                )
        if self.at_bound == "mask" and self.order == "fifo":
            yield Problem(
                "at_bound",
                "is mask, but with order: fifo no token can get over the bound. Set order: window, or remove at_bound.",
            )
        if not isinstance(self.depth, str) and not self.prompts_per_step <= self.depth <= most:
            yield Problem(
                "depth",
                f"is {self.depth}, but from prompts_per_step, {self.prompts_per_step}, to {most} groups may be ahead "
                "of training. Change it, or set depth: auto.",
            )
        yield from self._off_policy_problems(run)
        engines = self.engine.num_engines
        if engines > self.groups_at_once * self.samples_per_prompt:
            yield Problem(
                "engine.engines",
                f"is {engines}, but only {self.groups_at_once} groups of {self.samples_per_prompt} attempts are under "
                "way at a time. Lower it, or raise max_concurrent_groups.",
            )

    def _off_policy_problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.max_staleness == 0 or self.correction is not None or run.loss.uses_rollout_logprobs:
            return
        yield Problem(
            "max_staleness",
            f"is {self.max_staleness}, so tokens come from older weights than those that are trained on them, but "
            f"nothing weighs them: loss: {run.loss.name} compares with the trainer's logprobs before the update alone. "
            "Set source.correction: tis, which makes ppo decoupled PPO, or max_staleness: 0.",
        )


class RecordedRolloutsConfig(AsyncRolloutsConfig):
    """Train on the groups that another run has recorded, with the other settings of `async_rollouts`."""

    name: str = "recorded_rollouts"
    recorded: Annotated[str, PathSetting(reads=True), OnResume.BY_NAME] = Field(min_length=1)
    """Run directory of a run with `record_groups: true`."""

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, makes_attempts=False)

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.data.eval:
            yield Problem(
                "name",
                f"is {self.name}, which generates nothing and so cannot evaluate. Remove data.eval for this run.",
            )
