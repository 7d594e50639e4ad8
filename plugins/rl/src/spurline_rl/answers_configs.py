"""Settings of section `evaluation.generate` and of the evaluation `answers`. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from pydantic import Field

from spurline.config.run_config import EvaluationPart, RunConfig
from spurline.config.section import Section
from spurline.errors import Problem
from spurline.protocols.evaluation import EvaluationConfig
from spurline_rl.protocols.reward import RewardTable


class AnswerSettings(Section):
    """How answers are generated and scored."""

    rewards: RewardTable = Field(min_length=1)
    """Rewards by name. Each is a reward component, `module:function` or `file.py:function`. `{right: exact_match}` logs
    `eval/right`."""
    max_new_tokens: int = Field(default=128, gt=0)
    """Longest answer in tokens."""
    max_samples: int | None = Field(default=200, gt=0)
    """Number of prompts, from the beginning of the evaluation data. null takes all."""
    batch_size: int = Field(default=64, gt=0)
    """Prompts generated together."""
    retries: int = Field(default=2, ge=0)
    """How often an answer is scored again if a reward fails. Then the run ends with the error."""


class GenerationEvalConfig(EvaluationPart, AnswerSettings):
    """Generate answers to held-out prompts and score them."""

    component = "answers"
    generates: ClassVar[bool] = True

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if not run.backend.facts.generates:
            yield Problem(
                "",
                f"needs answers, but backend '{run.backend.name}' does not generate. Remove evaluation.generate, or "
                "set backend.name: local.",
            )


class AnswersEvaluationConfig(EvaluationConfig, AnswerSettings):
    """Greedy answers of the backend to held-out prompts, scored by rewards."""

    generates: ClassVar[bool] = True

    name: str = "answers"
