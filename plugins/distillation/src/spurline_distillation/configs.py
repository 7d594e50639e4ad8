"""Settings of distillation. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from string import Formatter
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume, Section
from spurline.errors import Problem, listing
from spurline.protocols.loss import LossConfig
from spurline_rl.protocols.advantage import AdvantageConfig
from spurline_rl.protocols.scorer import ScorerConfig

TOP_IDS, TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
"""Columns [R, L, K] of the likeliest tokens of a served teacher at each response token, and their logprobs."""


@runtime_checkable
class HasScorers(Protocol):
    """Settings of a source whose groups are scored."""

    @property
    def advantage(self) -> AdvantageConfig: ...
    @property
    def scorers(self) -> Sequence[ScorerConfig]: ...
    @property
    def kl_in_reward(self) -> object: ...


class TeachersSettings(Section):
    """Settings that choose the teacher of a row."""

    teacher: str = "teacher"
    """Role of the teacher: a key of `model.frozen`, or `reference`."""
    teachers: dict[str, str] = {}
    """Roles of several teachers, by the column of `source.carry` with their weight in a row. This is usually 1 for the
    row's own teacher and 0 for the others. Every teacher scores every row. If set, `teacher` is not used."""

    @property
    def weighted_teachers(self) -> Mapping[str | None, str]:
        """Return the role of each teacher by its column. The column None stands for the weight 1 everywhere."""
        return {**self.teachers} or {None: self.teacher}

    def uncarried(self, run: RunConfig) -> Iterable[Problem]:
        """Yield a problem for each column that the source does not carry."""
        for name in self.teachers:
            if name not in run.source.facts.carried:
                yield Problem(
                    f"teachers.{name}",
                    f"is the weight of a teacher in each row, but source.carry does not name this column. Add "
                    f"'{name}' to source.carry.",
                )


class DistillationConfig(TeachersSettings, LossConfig):
    """The divergence between the distributions of a teacher and of the trained model at each token."""

    learns_from_teacher: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True

    name: str = "distillation"
    divergence: Annotated[Literal["forward_kl", "reverse_kl", "jensen_shannon"], OnResume.BY_NAME] = "forward_kl"
    """`forward_kl` covers all that the teacher may say. `reverse_kl` avoids what it would not say. `jensen_shannon` is
    between the two (GKD, Agarwal et al. 2023, arXiv:2306.13649)."""
    beta: Annotated[float, OnResume.BY_NAME] = Field(default=0.5, gt=0, lt=1)
    """The teacher's share of the mixture in `jensen_shannon`."""
    top_k: Annotated[int | None, OnResume.BY_NAME] = Field(default=None, gt=0)
    """Compare the probabilities of only this many of the teacher's likeliest tokens, and of all other tokens together.
    If null, the whole vocabulary is compared."""
    temperature: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, ge=0.25, le=100)
    """Divisor of both models' logits. A value above 1 gives unlikely tokens more weight."""
    cross_entropy: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the negative log-likelihood of the tokens themselves, which is added to the divergence."""
    served: bool = False
    """Take the likeliest tokens of a served teacher, which the scorer `served_teacher` with `top_k` adds, instead of a
    teacher in `model.frozen`."""

    @property
    def roles(self) -> frozenset[str]:
        return frozenset() if self.served else frozenset(self.weighted_teachers.values())

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.loss is not self:
            return
        yield from self.uncarried(run)
        if self.divergence != "jensen_shannon" and self.beta != type(self).model_fields["beta"].default:
            yield Problem(
                "beta", f"is {self.beta:g}, which divergence: {self.divergence} does not read. Set jensen_shannon."
            )
        if self.served and (self.top_k is not None or self.temperature != 1 or self.teachers):
            yield Problem(
                "served",
                "is true, so the scorer `served_teacher` chooses the tokens. Remove `top_k`, `temperature` and "
                "`teachers` here, and set source.scorers[..].top_k.",
            )


class TeacherAdvantageConfig(TeachersSettings, AdvantageConfig):
    """The teacher's log-probability of each token minus the policy's (on-policy distillation)."""

    learns_from_rewards: ClassVar[bool] = False
    goes_with = "loss: policy_gradient or ppo"

    name: str = "teacher"
    weight: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of the teacher's advantages."""
    reward: Annotated[Literal["grpo", "dr_grpo", "rloo"] | None, OnResume.BY_NAME] = None
    """Advantage of the task's rewards, with its default settings, that is added. If null, rewards are only logged."""
    reward_weight: Annotated[float, OnResume.BY_NAME] = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Factor of the advantages of `reward`."""
    served: bool = False
    """Take the logprobs of a served teacher, which the scorer `served_teacher` adds, instead of a model's in the
    backend."""

    @property
    def reads_rewards(self) -> bool:
        return self.reward is not None

    @property
    def smallest_group(self) -> int:
        return 1 if self.reward is None else 2

    @property
    def roles(self) -> frozenset[str]:
        return frozenset() if self.served else frozenset(self.weighted_teachers.values())

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        yield from self.uncarried(run)
        if self.reward is None and self.reward_weight != 1:
            yield Problem("reward_weight", f"is {self.reward_weight:g}, but `reward` is null. Set reward: grpo.")
        columns = {f"{role}_logprobs" for role in self.weighted_teachers.values()}
        scorers = run.source.scorers if isinstance(run.source, HasScorers) else ()
        added = columns.intersection(name for scorer in scorers for name in scorer.columns)
        if self.served and added != columns:
            yield Problem(
                "served",
                f"is true, but no scorer adds {listing(columns - added)}. Add a `served_teacher` with this "
                "`role` to source.scorers, or set served: false and name a teacher in model.frozen.",
            )
        if not self.served and added:
            yield Problem(
                "served", f"is false, but a scorer adds {listing(added)}. Set served: true, or remove the scorer."
            )


class ServedTeacherConfig(ScorerConfig):
    """A teacher behind the OpenAI-compatible completions of vLLM, which scores each group when it is finished."""

    name: str = "served_teacher"
    urls: Annotated[tuple[str, ...], OnResume.FREE] = Field(min_length=1)
    """Addresses of servers of the same model, such as `http://gpu1:8000`. Groups are shared among them."""
    model: str | None = None
    """Name of the model at the servers. If null, the first that they list."""
    role: str = "teacher"
    """Role of the teacher. The column with its logprobs is `ROLE_logprobs`."""
    top_k: int = Field(default=0, ge=0, le=1000)
    """Number of the teacher's likeliest tokens to keep for `loss: {name: distillation, served: true}`. The server's
    option `--max-logprobs` must allow it."""
    max_concurrent: Annotated[int, OnResume.FREE] = Field(default=16, gt=0)
    """Groups that one server scores at the same time. Further groups wait."""
    request_timeout_s: Annotated[float, OnResume.FREE] = Field(default=120.0, gt=0)
    """Seconds that one request may take."""
    give_up_after_s: Annotated[float, OnResume.FREE] = Field(default=900.0, gt=0)
    """Seconds for which a group is tried again after a failure, at any of the servers, before its prompt is given
    up."""

    @property
    def columns(self) -> Collection[str]:
        return (f"{self.role}_logprobs", *((TOP_IDS, TOP_LOGPROBS) if self.top_k else ()))

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        temperature = run.source.facts.sampling_temperature
        if temperature != 1:
            yield Problem(
                "name",
                f"is {self.name}, whose logprobs are at temperature 1, but source.sampling.temperature is "
                f"{temperature:g}. Set it to 1, or use a teacher in model.frozen.",
            )
        sampling = run.source.facts.sampling
        if sampling is not None and sampling.top_k:
            yield Problem(
                "name",
                f"is {self.name}, whose logprobs are of the whole vocabulary, but the policy's are of the tokens that "
                f"source.sampling.top_k: {sampling.top_k} keeps. Set top_k: 0 and top_p: 1, or use a teacher in "
                "model.frozen.",
            )


class PrivilegedPromptConfig(ScorerConfig):
    """Another prompt for the teacher, which may show it the solution (self-distillation)."""

    name: str = "privileged_prompt"
    role: str = "teacher"
    """Role of the model that gets the prompt. With `reference`, the policy as it was at first teaches itself."""
    text: str = "{question}\n\nThe correct answer is: {reference}\n\nNow answer the question yourself."
    """The teacher's last user message. `{question}` is the policy's, `{reference}` the reference answer, and `{NAME}`
    a column of the row."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        try:
            plain = all(
                name is None or (name and not name.isdigit() and not {*".[]"} & {*name} and not spec and not conversion)
                for _, name, spec, conversion in Formatter().parse(self.text)
            )
        except ValueError:
            plain = False
        if not plain:
            yield Problem(
                "text",
                "may have braces only around names, as in {question} or {NAME}. Write other braces twice: {{ and }}.",
            )
        if not isinstance(run.source, HasScorers):
            return
        others = [f"loss: {run.loss.name}"] if self.role in run.loss.roles else []
        others += ["source.kl_in_reward"] if self.role == "reference" and run.source.kl_in_reward is not None else []
        if others:
            yield Problem(
                "role",
                f"is {self.role}, and {others[0]} compares the policy with the same model after the policy's prompt. "
                "Give the teacher a role of its own: an entry of model.frozen, whose path may be that of the policy.",
            )
        scorers = list(run.source.scorers)
        later = scorers[next(number for number, each in enumerate(scorers) if each is self) :]
        added = {column for each in later for column in each.columns}
        if self.role not in run.source.advantage.roles and f"{self.role}_logprobs" not in added:
            yield Problem(
                "role",
                f"is {self.role}, but nothing reads this prompt: it is for a teacher of source.advantage, or of a "
                f"`served_teacher` after it in source.scorers (with top_k for whole distributions). Roles of the "
                f"advantage: {listing(run.source.advantage.roles)}.",
            )
