"""Settings of reward models: their losses, the source of scored steps, and the reward. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from string import Formatter
from typing import Annotated, ClassVar, Literal, Protocol, runtime_checkable

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.loss import LossConfig, TrainsOn
from spurline.protocols.source import SourceFacts
from spurline_rl.protocols.reward import RewardConfig
from spurline_text.configs import SampleSourceConfig

Head = Literal["vocabulary", "score"]


class BradleyTerryConfig(LossConfig):
    """The loss of reward models on pairs of answers (Bradley and Terry 1952); for `source: preference`."""

    trains_on: ClassVar[TrainsOn] = "pairs"
    head: ClassVar[Head] = "score"

    name: str = "bradley_terry"
    margin: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Reward by which the chosen answer should exceed the rejected one (Llama 2, arXiv:2307.09288)."""
    margin_column: Annotated[str | None, OnResume.BY_NAME] = None
    """Column of `source.carry` with a margin for each pair, which is added to `margin`."""
    centering: Annotated[float, OnResume.BY_NAME] = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Coefficient of the squared sum of both rewards, which keeps rewards near 0 (Eisenstein et al. 2023,
    arXiv:2312.09244). 0.01 is usual."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if run.loss is self and run.source.facts.supplies != "pairs":
            yield Problem(
                "name", f"is {self.name}, but the source '{run.source.name}' has no pairs. Set source: preference."
            )


@runtime_checkable
class SaysKindOfLabel(Protocol):
    """Settings of a loss that says which labels it reads."""

    @property
    def kind_of_label(self) -> Literal["probability", "number"]: ...


class StepRewardConfig(LossConfig):
    """The loss of process reward models on labelled steps; for `source: scored_steps`."""

    trains_on: ClassVar[TrainsOn] = "labels"
    head: ClassVar[Head] = "score"

    name: str = "step_reward"
    kind_of_label: Literal["probability", "number"] = "probability"
    """`probability` reads labels from 0 to 1, and trains their log-odds by cross entropy. `number` reads any number,
    and trains the score itself by squared error."""


class ScoredStepsConfig(SampleSourceConfig):
    """Prompts with an answer in steps and a label for each step: the columns `prompt`, `completions` and `labels`."""

    run_defaults: ClassVar[dict[str, str]] = {"loss": "step_reward"}

    name: str = "scored_steps"
    separator: str = "\n"
    """Text that ends each step. The score of a step is that of its last token."""
    scored: Literal["all", "last"] = "all"
    """`all` trains on every step (a process reward). `last` trains on the whole answer (an outcome reward)."""

    @property
    def facts(self) -> SourceFacts:
        return replace(super().facts, supplies="labels", columns=("step_labels",))

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from super().problems(run)
        if run.loss.trains_on != "labels":
            yield Problem(
                "name", f"is {self.name}, whose labels loss '{run.loss.name}' does not read. Set step_reward."
            )
        if run.data.too_long == "split":
            yield Problem("name", f"is {self.name}, and data.too_long: split would cut answers. Set truncate or drop.")


class ModelRewardConfig(RewardConfig):
    """The score of a reward model for prompt and response: a frozen model of the backend, or a served model."""

    name: str = "model"
    role: str | None = None
    """Role of the model in `model.frozen`, which needs `head: score`. It reads the tokens of an attempt's last turn."""
    url: str | None = None
    """Address of a server with vLLM's interface, such as `http://localhost:8000`. Give this or `role`."""
    model: str | None = None
    """Name under which the server knows the model."""
    endpoint: Literal["pooling", "classify"] = "pooling"
    """The server's path. `pooling` asks for the score itself, `classify` for its probability."""
    suffix: str = ""
    """Text after each response: the token whose score was trained, such as the end of a turn (`<|im_end|>`)."""
    special_tokens: bool = False
    """Let the server add the special tokens of its tokenizer, such as BOS. Set this if prompts are plain text. Prompts
    that a chat template renders have these tokens already."""
    batch_size: Annotated[int, OnResume.FREE] = Field(default=64, gt=0)
    """Largest number of texts in one request."""
    request_timeout_s: Annotated[float, OnResume.FREE] = Field(default=60.0, gt=0)
    """Seconds that a request may take."""
    give_up_after_s: Annotated[float, OnResume.FREE] = Field(default=300.0, gt=0)
    """Seconds for which a failed request is repeated before its attempts fail. A server may start again meanwhile."""

    @property
    def scored_by(self) -> str | None:
        return self.role

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if (self.role is None) == (self.url is None):
            yield Problem("role", "and url: give exactly one of them.")
        elif self.url is not None and self.model is None:
            yield Problem("model", "is needed with a url: the name under which the server knows the model.")
        if self.url is None:
            for name, field in type(self).model_fields.items():
                if name not in ("name", "role", "url") and getattr(self, name) != field.default:
                    yield Problem(name, "is for a served model, and a model in model.frozen ignores it. Remove it.")
        frozen = run.model.frozen.get(self.role or "")
        if frozen is not None and frozen.head != "score":
            yield Problem(
                "role",
                f"is {self.role}, and model.frozen.{self.role} has no score head. Set model.frozen.{self.role}.head: "
                "score.",
            )


_RUBRIC = """\
Judge the answer below.

Task:
{prompt}

Answer:
{response}

Judge whether the answer is correct, complete and well written."""


class JudgeConfig(RewardConfig):
    """The mark of a served language model, by a rubric; as a share of the scale, from 0 to 1."""

    name: str = "judge"
    url: Annotated[str, OnResume.FREE]
    """Base URL of an OpenAI-compatible server, such as `http://localhost:8000/v1`."""
    model: str
    """Name under which the server knows the judge."""
    rubric: str = _RUBRIC
    """The request. `{prompt}`, `{response}`, `{reference}`, `{conversation}` and the names of the row's columns in
    braces are filled in; `{{` is a brace. The wanted form of the reply is added."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The worst and the best mark."""
    api_key_env: Annotated[str | None, OnResume.FREE] = None
    """Name of the environment variable with the server's key; null for a server that needs none."""
    cache: Annotated[str | None, OnResume.FREE] = None
    """File in which marks are kept, so that a resumed run, or another one, gets the same marks. null keeps them in
    memory."""
    max_new_tokens: int = Field(default=512, gt=0)
    """Largest number of tokens of a reply."""
    max_concurrent: Annotated[int, OnResume.FREE] = Field(default=32, gt=0)
    """Largest number of requests at the same time."""
    timeout_s: Annotated[float, OnResume.FREE] = Field(default=60.0, gt=0)
    """Seconds that a request may take."""
    retries: Annotated[int, OnResume.FREE] = Field(default=3, ge=0)
    """Number of times that a failed request is repeated. After that, the attempt has failed."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.scale[0] >= self.scale[1]:
            yield Problem("scale", f"is {list(self.scale)}. Give the worst mark first, as in [0, 10].")
        try:
            names = [name for _, name, _, _ in Formatter().parse(self.rubric) if name is not None]
        except ValueError as error:
            yield Problem("rubric", f"is not a template ({error}). Write {{{{ and }}}} for braces.")
            return
        if strange := [name for name in names if not name.isidentifier()]:
            yield Problem("rubric", f"names {{{strange[0]}}}, which is no column. Write {{{{ and }}}} for braces.")
        elif not {"response", "conversation"} & {*names}:
            yield Problem("rubric", "shows neither {response} nor {conversation}, so every answer would get one mark.")
