"""Kind `environment`: turn a prompt and a policy into a rewarded trajectory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig
from spurline.errors import SpurlineError

if TYPE_CHECKING:
    from spurline.protocols.dataset import DatasetConfig
    from spurline_rl.protocols.rollout_engine import GenerationResult, Sampling
    from spurline_rl.trajectory import Trajectory, Turn


class EnvironmentConfig(ComponentConfig):
    """Settings of an environment."""

    kind: ClassVar[str] = "environment"

    @property
    def reward_terms(self) -> Collection[str] | None:
        """Names of the reward terms of every attempt; None where only the attempts themselves tell."""
        return None

    @property
    def most_turns(self) -> int:
        """Responses that one attempt may ask for."""
        return 1

    @property
    def tool_names(self) -> Collection[str]:
        """Names of the tools that the model may call, for people; none where only the environment knows them."""
        return ()


class AttemptFailedError(SpurlineError):
    """One attempt went wrong in a way that another try may cure; the text says what and where."""


@dataclass(frozen=True)
class Task:
    """One attempt at one prompt.

    Attributes:
        row: The dataset row.
        dataset: The settings it is read with.
        uid: Names the draw of the prompt, unique in the run.
        sample: Which of the group's attempts this is, from 0.
        location: Where the row is, for messages.
    """

    row: Mapping[str, Any]
    dataset: DatasetConfig
    uid: str
    sample: int
    location: str


class PolicyHandle(Protocol):
    """The model as an environment talks to it: tokens in, tokens out. One handle per attempt; it remembers every turn.

    Attributes:
        sampling: What the run's config says; change limits and stops with `dataclasses.replace`. In training,
            temperature, top_p and top_k must stay: the trainer recomputes logprobs of the configured distribution
            (PluginError otherwise).
    """

    sampling: Sampling

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns finished so far, in the order in which they were asked for."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> GenerationResult:
        """The model's next turn after `prompt_ids`, the whole context. The handle counts turns and derives the seed.

        Raises:
            DataError: If the prompt is empty or fills the model's context.
        """
        ...

    def finish(
        self,
        rewards: Mapping[str, float] | None = None,
        *,
        turn_rewards: Sequence[float] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> Trajectory:
        """All turns as the attempt's trajectory.

        Args:
            rewards: Named terms of the whole attempt, before weights; the same names in every attempt.
            turn_rewards: One number per turn, as it is, for the last token of each.
            info: JSON-able facts for the log and the report, such as `prompt` and `response`.
        """
        ...


@runtime_checkable
class ShowsPrompt(Protocol):
    """An environment that knows beforehand what the model is first given, for plans and checks of length."""

    def first_prompt(self, task: Task) -> Sequence[int]:
        """Token ids of the prompt of the first turn. Raises DataError for a row that cannot be used."""
        ...


class Environment(Protocol):
    """Run one attempt at a prompt.

    Factory: `Class(config, registry=Registry, tokenizer=PreTrainedTokenizerBase, data=DataConfig)`. One instance serves
    all attempts, many at the same time on one event loop: `run` keeps its state in local variables. Code that takes
    long without awaiting belongs in `spurline_rl.concurrency.in_thread` or in a process; time limits cannot reach it
    elsewhere. An environment that holds processes or files also has `close()`, plain or async.
    """

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        """A trajectory with named reward terms, or rewards per turn; usually `policy.finish(...)`.

        Errors: a DataError says that this row cannot be used: it ends the run, or with `on_bad_row: skip` the row is
        left out; so does a context that is full before the first turn, but one that filled up later is the attempt's
        matter and has to be caught. Other SpurlineErrors, but for AttemptFailedError, end the run; any other exception,
        and a time-out, means another attempt; after `faults.retries` of these the prompt is given up.
        """
        ...
