"""Settings of evaluations that generate: attempts at held-out prompts, and greedy answers. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field

from spurline.config.run_config import EvaluationPart, RunConfig
from spurline.config.section import Section
from spurline.errors import Problem, listing, suggestion
from spurline.protocols.evaluation import EvaluationConfig
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.reward import RewardTable


class SuccessConfig(Section):
    """The rule that decides whether an attempt at a held-out prompt passes."""

    reward: str | None = None
    """Name of the reward term that decides. If null, the environment's only term decides, or the sum of turn rewards if
    the environment has no terms."""
    at_least: float = Field(default=1.0, allow_inf_nan=False)
    """An attempt passes if the term, before its weight is applied, is at least this number."""


class HeldOutConfig(Section):
    """Evaluation with rollouts of the held-out prompts in `data.eval`."""

    samples_per_prompt: int = Field(default=1, gt=0)
    """Attempts at each prompt. With k > 1 attempts, `eval/pass@k` is logged in addition to `eval/pass@1`."""
    temperature: float = Field(default=0.0, ge=0, le=10)
    """Sampling temperature; 0 decodes greedily."""
    max_prompts: int | None = Field(default=200, gt=0)
    """Evaluate only the first `max_prompts` prompts of the held-out data; null evaluates all."""
    success: SuccessConfig = SuccessConfig()
    """The rule that decides whether an attempt passes."""
    success_by_environment: dict[str, SuccessConfig] = {}
    """Rules of single environments of a run with several, by label. The others have the rule `success`."""

    def success_of(self, environment: str) -> tuple[SuccessConfig, str]:
        """Return the rule for the attempts in an environment, and the name of its setting."""
        if environment in self.success_by_environment:
            return self.success_by_environment[environment], f"success_by_environment.{environment}"
        return self.success, "success"

    def success_problems(self, source: Any, prefix: str = "") -> Iterable[Problem]:
        """Yield the problems of these rules with the environments of a source. `prefix` precedes their settings."""
        environments = terms_by_environment(source)
        for label in self.success_by_environment.keys() - environments.keys():
            yield Problem(f"{prefix}success_by_environment.{label}", unknown_environment(label, environments))
        for label, terms in environments.items():
            of = f" These are the terms of the environment '{label}'; see success_by_environment." if label else ""
            success, setting = self.success_of(label)
            for problem in success_problems(success, terms, f"{prefix}{setting}"):
                yield replace(problem, message=f"{problem.message}{of}")

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.samples_per_prompt > 1 and self.temperature == 0:
            yield Problem(
                "samples_per_prompt",
                f"is {self.samples_per_prompt}, but at temperature 0 all attempts at a prompt are the same. Set "
                "temperature: 1.0, or samples_per_prompt: 1.",
            )


def terms_by_environment(source: Any) -> Mapping[str, Collection[str] | None]:
    """Return the names of the reward terms of each environment of a source, by label. None means not known beforehand.

    In a source with one environment, its label is an empty text.
    """
    environment: EnvironmentConfig | None = getattr(source, "environment", None)
    parts = {} if environment is None else environment.by_label
    return {label: part.reward_terms for label, part in parts.items()} or {"": source.facts.reward_terms}


def success_problems(
    success: SuccessConfig, terms: Collection[str] | None, setting: str = "success"
) -> Iterable[Problem]:
    """Yield the problems of the rule in `setting` in an environment with these reward terms, or None if unknown."""
    if terms is None:
        return
    if success.reward is None and len(terms) > 1:
        yield Problem(
            setting,
            "does not say which reward decides whether an attempt has passed. There are several. Set it, as in "
            f"{{reward: {min(terms)}, at_least: 1}}. Terms: {listing(terms)}.",
        )
    if success.reward is not None and success.reward not in terms:
        yield Problem(f"{setting}.reward", unknown_term(success.reward, terms))


def unknown_term(reward: str, terms: Collection[str]) -> str:
    """Return an error message for the name of a reward term that does not exist."""
    return f"is '{reward}', which is not a reward term.{suggestion(reward, terms)} Terms: {listing(terms)}."


def unknown_environment(label: str, labels: Collection[str]) -> str:
    """Return an error message for a label that no environment of the run has."""
    known = listing(filter(None, labels))
    return f"is not an environment of the run.{suggestion(label, labels)} Environments: {known}."


class RolloutsEvaluationConfig(EvaluationConfig, HeldOutConfig):
    """Attempts at held-out prompts in the run's environment, with the current weights."""

    needs_attempts = True

    name: str = "rollouts"

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from EvaluationConfig.problems(self, run)
        yield from HeldOutConfig.problems(self, run)
        yield from self.success_problems(run.source)


class AnswerSettings(Section):
    """Settings for generating and scoring answers."""

    rewards: RewardTable = Field(min_length=1)
    """Rewards by name. Each is a component, or a function as `module:function` or `file.py:function`.
    `{right: exact_match}` logs `eval/right`."""
    max_new_tokens: int = Field(default=128, gt=0)
    """Largest number of tokens in an answer."""
    max_samples: int | None = Field(default=200, gt=0)
    """Use only the first `max_samples` prompts of the evaluation data; null uses all."""
    batch_size: int = Field(default=64, gt=0)
    """Number of prompts whose answers are generated together."""
    retries: int = Field(default=2, ge=0)
    """How often an answer is scored again if a reward fails. If the last retry fails, the run ends with the error."""

    def reward_problems(self) -> Iterable[Problem]:
        """Yield a problem for each reward that only a source of rollouts can ask for."""
        for term, reward in self.rewards.items():
            if reward.scored_by is not None:
                yield Problem(
                    f"rewards.{term}",
                    f"asks the model '{reward.scored_by}', which scores only rollouts. Serve it (url).",
                )


class GenerationEvalConfig(EvaluationPart, AnswerSettings):
    """Generate answers to held-out prompts and score them."""

    component = "answers"
    generates = True

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if not run.backend.facts.generates:
            yield Problem(
                "",
                f"needs answers, but backend '{run.backend.name}' does not generate. Remove evaluation.generate, or "
                "set backend.name: local.",
            )
        yield from self.reward_problems()


class AnswersEvaluationConfig(EvaluationConfig, AnswerSettings):
    """Greedy answers of the backend to held-out prompts, scored by rewards."""

    generates = True

    name: str = "answers"

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        yield from self.reward_problems()
