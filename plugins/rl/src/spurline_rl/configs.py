"""Settings of rollout sources and their collator. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from spurline.config.run_config import RunConfig
from spurline.config.section import Component, OnResume, Section
from spurline.data.configs import PaddedCollatorConfig
from spurline.errors import Problem, listing
from spurline.protocols.source import SourceConfig, SourceFacts
from spurline_models.backend_config import ColocatedEngine, LargestUpdate
from spurline_rl.environments.configs import as_environment
from spurline_rl.evaluation_configs import HeldOutConfig, terms_by_environment, unknown_term
from spurline_rl.protocols.advantage import AdvantageConfig
from spurline_rl.protocols.correction import CorrectionConfig
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig
from spurline_rl.protocols.scorer import ScorerConfig

OVERLONG = "overlong"
"""Name of the reward term that `source.overlong` adds."""
CUT_OFF = "cut_off"
"""Name of the reward term that `source.cut_off: penalise` adds."""


def support_width(top_k: int) -> int:
    """Return the number of columns of `support` in rollouts that are sampled with this `top_k`; 0 for `top_k` 0."""
    # Engines keep all tokens whose logits equal that of the last of `top_k`. In half precision this is frequent.
    return top_k + 16 if top_k else 0


class SamplingConfig(Section):
    """Settings for sampling rollouts."""

    # `allow_truncated` only let other settings pass a check.
    retired: ClassVar[tuple[str, ...]] = ("allow_truncated",)
    temperature: float = Field(default=1.0, gt=0, le=10)
    """Engines and the trainer divide logits by this number."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample only from the likeliest tokens with this total probability. A value below 1 needs `top_k`."""
    top_k: int = Field(default=0, ge=0)
    """Sample only from this many of the likeliest tokens; 0 means all. Engines report the tokens that `top_k` and
    `top_p` kept, 4 x (top_k + 16) bytes per token. The trainer computes logprobs over the same tokens."""
    max_new_tokens: int = Field(default=1024, gt=0)
    """Largest number of tokens in the response of one turn."""
    stop: tuple[str, ...] = ()
    """Texts that end a response, besides the model's own end tokens."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.top_p < 1 and not self.top_k:
            yield Problem(
                "top_p",
                f"is {self.top_p:g}, which may keep any number of tokens, and training needs to know all of them. Set "
                "top_k, which bounds this number, as in top_k: 64, or set top_p: 1.",
            )


class OverlongConfig(Section):
    """A penalty on responses that are almost as long as allowed (DAPO, Yu et al. 2025, arXiv:2503.14476)."""

    buffer_tokens: int = Field(gt=0)
    """The penalty begins this many tokens before sampling.max_new_tokens, and grows with every token."""
    penalty: float = Field(default=1.0, gt=0)
    """Penalty of a response with max_new_tokens tokens."""


class CutOffConfig(Section):
    """The treatment of attempts whose last response reached max_new_tokens, or filled the context. They may be right
    and only too long. A lower limit that an agent sets itself does not cut off."""

    action: Literal["keep", "mask", "penalise"] = "keep"
    """`keep` trains on them like on others. `mask` leaves out their tokens (overlong filtering of DAPO, Yu et al. 2025,
    arXiv:2503.14476). `penalise` adds the reward term `cut_off`, which is -1 for them and 0 for others."""
    in_baseline: bool = True
    """Compare other samples of a prompt with masked ones too. If false, the baseline is that of finished answers, and a
    prompt that is hard to finish teaches nothing about length."""
    penalty: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Weight of the term of `penalise`."""

    @property
    def leaves_baseline(self) -> bool:
        """Return whether some attempts are not compared with others."""
        return self.action == "mask" and not self.in_baseline

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if not self.in_baseline and self.action != "mask":
            yield Problem("in_baseline", f"is for action: mask, and the action is {self.action}. Remove it.")
        if "penalty" in self.model_fields_set and self.action != "penalise":
            yield Problem("penalty", f"is for action: penalise, and the action is {self.action}. Remove it.")


class KlInRewardConfig(Section):
    """A penalty on the divergence from the reference model. It lowers token rewards before advantages are computed."""

    coefficient: float = Field(gt=0)
    """Weight of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the divergence (Schulman 2020)."""


class FaultsConfig(Section):
    """Limits and retries for environments and rewards that fail."""

    retries: Annotated[int, OnResume.BY_NAME] = Field(default=2, ge=0)
    """Largest number of retries of an attempt that fails or takes too long."""
    attempt_timeout_s: Annotated[float, OnResume.BY_NAME] = Field(default=600.0, gt=0)
    """Seconds that one attempt may take."""
    max_quarantined: Annotated[int, OnResume.FREE] = Field(default=16, ge=0)
    """Largest number of different prompts that the whole run may give up. Unusable rows do not count."""


class PromptSourceConfig(SourceConfig):
    """Base of the configs of sources that train on rollouts."""

    run_defaults: ClassVar[Mapping[str, str]] = {"collator": "rollouts", "minibatches": "by_prompt", "loss": "ppo"}

    prompts_per_step: int = Field(default=32, gt=0)
    """Prompts in the batch of one step."""
    samples_per_prompt: int = Field(default=8, gt=0)
    """Attempts at each prompt. Together they are the prompt's group."""
    environment: Annotated[EnvironmentConfig, Component("environment")]
    """The environment, which turns a prompt into a trajectory with rewards."""
    engine: Annotated[RolloutEngineConfig, Component("rollout_engine"), OnResume.BY_NAME]
    """The engine that generates."""
    sampling: Annotated[SamplingConfig, OnResume.BY_NAME] = SamplingConfig()
    """Settings for sampling tokens."""
    reward_weights: Annotated[dict[str, float], OnResume.BY_NAME] = {}
    """Weight of each reward term; the default is 1."""
    advantage: Annotated[AdvantageConfig, Component("advantage")]
    """The algorithm that computes advantages from rewards."""
    advantage_scope: Annotated[Literal["batch", "minibatch"], OnResume.BY_NAME] = "batch"
    """Groups from which an advantage computes a joint statistic: all of the `batch`, or those of one `minibatch`."""
    correction: Annotated[Annotated[CorrectionConfig, Component("correction")] | None, OnResume.BY_NAME] = None
    """Correction for the difference between the engine's and the trainer's distributions; null for none."""
    turns: Annotated[Literal["separate", "merged"], OnResume.BY_NAME] = "separate"
    """`separate` makes a training row per turn (step-wise training). `merged` makes one row per attempt if each turn
    continues the tokens of the turn before. Other attempts keep a row per turn."""
    zero_variance: Annotated[Literal["keep", "refill"], OnResume.BY_NAME] = "keep"
    """Groups whose rewards are all equal have no gradient. `keep` trains on them. `refill` leaves them out and draws
    further prompts (dynamic sampling of DAPO, Yu et al. 2025, arXiv:2503.14476)."""
    max_draws_per_step: Annotated[int | None, OnResume.BY_NAME] = Field(default=None, gt=0)
    """Prompts that one step may draw, including prompts that are given up or left out by `zero_variance: refill`; null
    is 8 x prompts_per_step."""
    router_replay: Annotated[bool, OnResume.BY_NAME] = False
    """Send each token to the experts that the engine chose, in the trained model and the reference (Ma et al. 2025,
    arXiv:2510.11370). Routers still learn how to weight these experts. A critic's routers choose freely."""
    carry: tuple[str, ...] = ()
    """Columns of the training data with numbers or booleans. Advantages read them from `Group.columns`. A loss that
    lists such a column in `needs` gets it as a float32 column of the batch."""
    scorers: Annotated[tuple[Annotated[ScorerConfig, Component("scorer")], ...], OnResume.BY_NAME] = ()
    """Components that each finished group goes through, in order, such as a served model that adds its logprobs."""
    overlong: Annotated[OverlongConfig | None, OnResume.BY_NAME] = None
    """Penalty on responses that are almost as long as allowed; null for none."""
    cut_off: Annotated[CutOffConfig, OnResume.BY_NAME] = CutOffConfig()
    """Treatment of attempts that were cut off: `keep`, `mask` or `penalise`, or a mapping with further settings."""
    kl_in_reward: Annotated[KlInRewardConfig | None, OnResume.BY_NAME] = None
    """Penalty in the rewards on the divergence from the reference model; null for none."""
    keep_rollouts: Annotated[int, OnResume.FREE] = Field(default=1000, ge=0)
    """Largest size in MB of the folder RUN_DIR/rollouts, which stores the attempts of every step. If the folder is
    larger, the oldest steps are deleted. The newest step always stays. 0 stores no rollouts."""
    faults: FaultsConfig = FaultsConfig()
    """Limits and retries for attempts that fail."""
    held_out: Annotated[HeldOutConfig, OnResume.FREE] = HeldOutConfig()
    """Evaluation with held-out prompts."""
    max_concurrent: Annotated[int, OnResume.TO_ROUNDING] = Field(default=256, gt=0)
    """Largest number of attempts that run at the same time. The time that an attempt waits for the engine counts toward
    its time limit, so do not set this number far above the number of responses that the engine decodes together."""

    @field_validator("environment", mode="before")
    @classmethod
    def _take_environment(cls, value: Any) -> Any:
        return as_environment(value)

    @field_validator("cut_off", mode="before")
    @classmethod
    def _take_action(cls, value: Any) -> Any:
        return {"action": value} if isinstance(value, str) else value

    @property
    def added_terms(self) -> dict[str, float]:
        """Return the reward terms that this source adds in training, with their weights."""
        overlong = {} if self.overlong is None else {OVERLONG: self.overlong.penalty}
        return overlong | ({CUT_OFF: self.cut_off.penalty} if self.cut_off.action == "penalise" else {})

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from self._run_problems(run)
        yield from super().problems(run)
        yield from self._reward_problems(run)
        yield from self._advantage_problems(run)
        yield from self._replay_problems(run)
        taken = {*self._own_columns, *self.carry}
        for number, scorer in enumerate(self.scorers):
            if twice := taken.intersection(scorer.columns):
                yield Problem(
                    f"scorers.{number}",
                    f"adds {listing(twice)}, which the batch already has. Give the scorer another role, or remove it.",
                )
            taken.update(scorer.columns)
        if self.zero_variance == "refill" and (why := self.equal_returns_teach(run)):
            yield Problem(
                "zero_variance",
                f"is refill, which leaves out groups whose rewards are all equal. Here {why}, so these groups teach "
                "too. Set zero_variance: keep.",
            )
        if self.zero_variance == "refill" and self.samples_per_prompt < 2:
            yield Problem(
                "zero_variance",
                "is refill, which leaves out every group of a single sample. Raise samples_per_prompt, or set "
                "zero_variance: keep.",
            )
        if self.zero_variance == "refill" and self.environment.model_rewards:
            yield Problem(
                "zero_variance",
                "is refill, which needs all rewards before a step's batch is made, and models of the backend score "
                f"only then ({listing(self.environment.model_rewards)}). Set zero_variance: keep, or serve the model "
                "(url).",
            )
        if self.draw_limit < self.prompts_per_step:
            yield Problem(
                "max_draws_per_step",
                f"is {self.max_draws_per_step}, fewer than prompts_per_step: {self.prompts_per_step}. Raise it.",
            )

    def _reward_problems(self, run: RunConfig) -> Iterable[Problem]:
        known, overlong = self.environment.reward_terms, self.overlong
        if run.data.eval:
            yield from self.held_out.success_problems(self, "held_out.")
        if known is not None:
            terms = {*known, *self.added_terms}
            for name in sorted(self.reward_weights.keys() - terms):
                yield Problem(f"reward_weights.{name}", unknown_term(name, terms))
        is_read = self.advantage.reads_rewards and not run.loss.learns_from_teacher
        for name in () if is_read else ("kl_in_reward", "overlong"):
            if getattr(self, name) is not None:
                yield Problem(name, "changes rewards, and here only a teacher says what to learn. Remove it.")
        environment, longest = self.environment, self.sampling.max_new_tokens
        least = min(environment.turn_tokens(label, longest) for label in environment.by_label or ("",))
        if overlong is not None and overlong.buffer_tokens > least:
            limit = "sampling.max_new_tokens" if least == longest else "the smallest limit of an environment"
            yield Problem(
                "overlong.buffer_tokens",
                f"is {overlong.buffer_tokens}, more than {limit}: {least}. Choose a smaller number.",
            )

    def _replay_problems(self, run: RunConfig) -> Iterable[Problem]:
        if not self.router_replay:
            return
        if not self.engine.notes_experts:
            yield Problem(
                "router_replay",
                f"is true, but engine '{self.engine.name}' with these settings does not record its experts. Set "
                "router_replay: false, or use engine in_process, child_process, or vllm with mode: engine.",
            )
        if not run.backend.facts.replays_experts:
            yield Problem(
                "router_replay",
                f"is true, but backend '{run.backend.name}' with these settings cannot replay experts. Set "
                "router_replay: false, leave backend.compile off, or choose backend local, fsdp or megatron.",
            )

    def _advantage_problems(self, run: RunConfig) -> Iterable[Problem]:
        advantage = self.advantage
        for role in sorted(advantage.roles & run.model.frozen.keys()):
            if run.model.frozen[role].head == "score":
                yield Problem(
                    "advantage.name",
                    f"is {advantage.name}, which reads the logprobs of '{role}', and model.frozen.{role} has head: "
                    "score. Use the language model.",
                )
        if self.samples_per_prompt < advantage.smallest_group and not run.loss.learns_from_teacher:
            yield Problem(
                "advantage.name",
                f"is {advantage.name}, which compares the samples of a prompt, but source.samples_per_prompt is "
                f"{self.samples_per_prompt}. Set it to {advantage.smallest_group} or more, or choose reinforce_pp with "
                "baseline: batch, or gae.",
            )
        if self.kl_in_reward is not None and advantage.divides_by_spread:
            yield Problem(
                "advantage.name",
                f"is {advantage.name}, which divides by the spread or the mean of a prompt's returns. That turns the "
                "small differences of source.kl_in_reward into large ones. Remove kl_in_reward and set "
                "loss.kl.coefficient, or choose grpo with normalize_std: false, dr_grpo, rloo or gae.",
            )
        weights = self.reward_weights | {name: weight for name, weight in self.added_terms.items() if weight != 1}
        terms = terms_by_environment(self)
        for name, weight in weights.items():
            having = [label for label, known in terms.items() if known is None or name in (*known, *self.added_terms)]
            # Several environments may share an advantage.
            for setting, part in dict(map(advantage.part, having)).items():
                if part.weighs_terms:
                    yield Problem(
                        f"{setting}.name",
                        f"is {part.name}, which weighs reward terms itself, so the weight {weight:g} of '{name}' would "
                        f"be lost. Set {setting}.weights.{name}: {weight:g}, and leave it at 1 in the source.",
                    )
        if advantage.uses_critic and run.loss.learns_from_teacher:
            yield Problem(
                "advantage.name",
                f"is {advantage.name}, which needs a critic, and loss: {run.loss.name} reads no advantages. Remove it, "
                "and the section `critic`.",
            )
        elif advantage.uses_critic and run.trained_critic is None:
            yield Problem(
                "advantage.name",
                f"is {advantage.name}, which needs a critic, but this run has none. Add a section `critic: {{}}`, or "
                "choose an advantage without a critic, such as grpo.",
            )
        if self.advantage_scope == "minibatch" and run.minibatches.minibatch_prompts(self.prompts_per_step) is None:
            yield Problem(
                "advantage_scope",
                f"is minibatch, but minibatches: {run.minibatches.name} sets no number of prompts per mini-batch. Set "
                "advantage_scope: batch, or minibatches: by_prompt, or define `minibatch_prompts` in your own config.",
            )

    def _run_problems(self, run: RunConfig) -> Iterable[Problem]:
        for section, key, instead in (
            (run, "batch_size", "source.prompts_per_step and source.samples_per_prompt set the size of a batch"),
            (run, "prefetch", "a batch of rollouts depends on the last weights and cannot be built ahead"),
            (run.evaluation, "evaluation.batch_size", "source.held_out and source.max_concurrent set it"),
        ):
            if key.rpartition(".")[2] in section.model_fields_set:
                yield Problem("name", f"is {self.name}, which does not use '{key}': {instead}. Remove '{key}'.")
        # A loss that trains on `returns` is the loss of a critic. Its config reports that it cannot train the policy.
        if run.loss.trains_on not in ("advantages", "returns") and not run.loss.learns_from_teacher:
            yield Problem(
                "name",
                f"is {self.name}, but loss: {run.loss.name} reads no advantages, so rewards would have no effect. Set "
                "loss: ppo, or remove the line. The config of your own loss must derive from PolicyLossConfig.",
            )
        if "held_out" in self.model_fields_set and not run.data.eval:
            yield Problem("held_out", "needs held-out prompts, but `data.eval` is empty. Set data.eval, or remove it.")
        if any(part.generates for part in run.evaluation.parts):
            yield Problem(
                "name",
                f"is {self.name}, which evaluates with rollouts. Remove evaluation.generate and set source.held_out.",
            )
        if not run.collator.one_turn_per_row:
            yield Problem(
                "name",
                f"is {self.name}, which needs one turn per row, but the collator is {run.collator.name}. Set collator: "
                "rollouts, or remove the line.",
            )

    @property
    def _own_columns(self) -> Sequence[str]:
        """Return the columns of batches that no scorer adds."""
        return (
            *("advantages", "rewards", "old_logprobs", "rollout_logprobs", "token_versions"),
            *(("values", "returns") if self.advantage.uses_critic else ()),
            *(("correction_factors",) if self.correction is not None else ()),
        )

    @property
    def facts(self) -> SourceFacts:
        return replace(
            super().facts,
            without_critic=None if self.advantage.uses_critic else f"the advantage '{self.advantage.name}'",
            supplies="rollouts",
            makes_attempts=True,
            compares_logprobs=True,
            num_prompts=self.prompts_per_step,
            columns=(*self._own_columns, *(name for scorer in self.scorers for name in scorer.columns)),
            carried=self.carry,
            reward_terms=self.environment.reward_terms,
            context_tokens=self.engine.context_tokens,
            sampling=self.sampling,
            sampling_temperature=self.sampling.temperature,
            roles={
                *self.advantage.roles,
                *self.environment.model_rewards.values(),
                *(() if self.kl_in_reward is None else ("reference",)),
            },
            has_colocated_engines=self.engine.is_colocated,
            replays_experts=self.router_replay,
        )

    def equal_returns_teach(self, run: RunConfig) -> str | None:
        """Return why groups with equal returns teach like others, or None if they do not."""
        if run.loss.learns_from_teacher or not self.advantage.learns_from_rewards:
            return "a teacher gives the advantages"
        return None if self.advantage.compares_returns else f"{self.advantage.name} compares parts of returns"

    def longest_attempt(self, prompt_tokens: int, context: int | None) -> int:
        """Return the largest number of tokens that an attempt can have."""
        length = prompt_tokens + self.environment.most_tokens(self.sampling.max_new_tokens)
        return length if context is None else min(length, context)

    # `spurline_planning.protocols.PlansRollouts` describes the next four methods.

    def largest_update(self, run: RunConfig, prompt_tokens: int, context: int | None) -> LargestUpdate:
        prompts = run.minibatches.minibatch_prompts(self.prompts_per_step) or self.prompts_per_step
        length = self.longest_attempt(prompt_tokens, context)
        return LargestUpdate(length, prompts * self.samples_per_prompt * length)

    def generation_memory(self, run: RunConfig, prompt_tokens: int, context: int | None) -> dict[str, int]:
        length = self.longest_attempt(prompt_tokens, context)
        return self.engine.estimate_memory(run, self.responses_at_once, length)

    def colocated_engine(self, run: RunConfig, prompt_tokens: int, context: int | None) -> ColocatedEngine | None:
        return None

    def generation_notes(self, run: RunConfig, prompt_tokens: int, context: int | None) -> Sequence[str]:
        return self.engine.describe(run, self.responses_at_once, self.longest_attempt(prompt_tokens, context))

    @property
    def responses_at_once(self) -> int:
        """Return how many responses may be generated at the same time."""
        return min(self.max_concurrent, self.prompts_per_step * self.samples_per_prompt)

    @property
    def draw_limit(self) -> int:
        """Return how many prompts one step may draw."""
        return self.max_draws_per_step or 8 * self.prompts_per_step


class RolloutSourceConfig(PromptSourceConfig):
    """Synchronous reinforcement learning. Each step generates with the weights that the previous step produced."""

    name: str = "rollouts"

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if self.engine.borrows_model and not (run.backend.facts.lends_model or self.engine.holds_copy):
            yield Problem(
                "engine.name",
                f"is {self.engine.name}, which generates with the backend's model, but backend '{run.backend.name}' "
                "does not hold all of it in this process. Set engine: in_process, backend.name: local, or choose a "
                "source that publishes weights.",
            )
        if self.engine.is_colocated:
            yield Problem(
                "engine.placement",
                f"is colocated, which source '{self.name}' does not support. Set source: async_rollouts with "
                "max_staleness: 0, which trains on the same batches.",
            )


class RolloutsCollatorConfig(PaddedCollatorConfig):
    """Put one turn of a trajectory in each row."""

    one_turn_per_row = True
    name: str = "rollouts"
