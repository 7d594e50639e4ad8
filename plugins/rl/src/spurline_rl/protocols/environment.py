"""Kind `environment`: turn a prompt and a policy into a rewarded trajectory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast, runtime_checkable

from spurline.config.section import ComponentConfig
from spurline_concurrency.calls import AttemptFailedError as AttemptFailedError

if TYPE_CHECKING:
    from spurline.protocols.dataset import DatasetConfig
    from spurline_rl.protocols.rollout_engine import GenerationResult, Sampling
    from spurline_rl.trajectory import Trajectory, Turn


class EnvironmentConfig(ComponentConfig):
    """Settings of an environment."""

    kind: ClassVar[str] = "environment"

    @property
    def reward_terms(self) -> Collection[str] | None:
        """Return the names of the reward terms of every attempt; None if they are not known beforehand."""
        return None

    @property
    def model_rewards(self) -> Mapping[str, str]:
        """Return {reward term: role} of the rewards that models of the backend give (`RewardConfig.scored_by`).

        These are the rewards in all settings of the type `RewardTable`.
        """
        tables = (cast("Mapping[str, Any]", value) for _, value in self if isinstance(value, Mapping))
        roles = {term: getattr(each, "scored_by", None) for table in tables for term, each in table.items()}
        return {term: role for term, role in roles.items() if role is not None}

    @property
    def most_turns(self) -> int:
        """Return the largest number of responses of one attempt."""
        return 1

    @property
    def tool_names(self) -> Collection[str]:
        """Return the names of the tools that the model may call, for messages."""
        return ()

    @property
    def by_label(self) -> Mapping[str, EnvironmentConfig]:
        """Return the environments among which rows choose, by label. It is empty if all rows have this environment."""
        return {}

    def part(self, label: str) -> EnvironmentConfig:
        """Return the environment of the attempts with this label, which is `Trajectory.environment`."""
        return self.by_label.get(label, self)

    def turn_tokens(self, label: str, max_new_tokens: int) -> int:
        """Return the largest number of tokens of a turn in the environment `label`, of at most `max_new_tokens`."""
        return max_new_tokens

    def most_tokens(self, max_new_tokens: int) -> int:
        """Return the largest number of response tokens of an attempt if a turn may have `max_new_tokens`."""
        parts = self.by_label or {"": self}
        return max(part.most_turns * self.turn_tokens(label, max_new_tokens) for label, part in parts.items())


@dataclass(frozen=True)
class Task:
    """One attempt at one prompt.

    Attributes:
        dataset: The settings of the row's dataset.
        uid: Name of the drawn prompt, unique in the run.
        sample: Number of the attempt in its group, from 0.
        location: Where the row is, for messages.
    """

    row: Mapping[str, Any]
    dataset: DatasetConfig
    uid: str
    sample: int
    location: str


class PolicyHandle(Protocol):
    """The model for an environment: tokens in, tokens out. Each attempt has its own handle, which remembers every turn.

    Attributes:
        sampling: Sampling settings of the run. For a turn, change limits and stops with `dataclasses.replace`. In
            training, a different temperature, top_p or top_k raises PluginError, since the trainer computes logprobs
            with the run's values.
    """

    sampling: Sampling

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Return the turns finished so far, in the order of their requests."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling | None = None) -> GenerationResult:
        """Generate the model's next turn after `prompt_ids`, the whole context.

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
        """Return all turns as the attempt's trajectory.

        Args:
            rewards: Reward terms of the attempt by name, not yet multiplied by their weights. Every attempt in an
                environment must have the same names.
            turn_rewards: One number per turn, for the turn's last token. Reward weights do not apply to turn rewards.
            info: JSON-serializable facts for the log and the report, such as `prompt` and `response`. Numbers in a
                mapping `metrics` are logged by their names, as means over the attempts of a step.
        """
        ...


@runtime_checkable
class ShowsPrompt(Protocol):
    """An environment that knows the first prompt of an attempt beforehand."""

    def first_prompt(self, task: Task) -> Sequence[int] | None:
        """Return the token ids of the first prompt, or None if this row's prompt is not known beforehand.

        Raises DataError for a row that cannot be used.
        """
        ...


@runtime_checkable
class ChoosesByRow(Protocol):
    """An environment that consists of several, among which each row chooses one by a label.

    The label becomes `info["environment"]` of the attempts.
    """

    def label_of(self, task: Task) -> str:
        """Return the label of the row's environment. Raises DataError, which names the row, if it has none."""
        ...

    def time_limit_of(self, label: str) -> tuple[float, str] | None:
        """Return the seconds that an attempt may take, and the setting that says so; None for the limit of the run."""
        ...


class Environment(Protocol):
    """Run one attempt at a prompt.

    Factory: `Class(config, registry=Registry, tokenizer=PreTrainedTokenizerBase, data=DataConfig)`. One instance makes
    all attempts, many at the same time on one event loop, so `run` must keep its state in local variables. Time limits
    cannot stop code that does not await. Run slow code with `spurline_concurrency.calls.in_thread` or in a process. An
    environment that holds processes or files also has `close()`, plain or async. It may have `notes`, sentences that
    `spurline plan` and the start of a run show, and `reward_terms`, names of terms that its config does not know.
    """

    async def run(self, task: Task, policy: PolicyHandle) -> Trajectory:
        """Return a trajectory with named reward terms, or rewards per turn; usually `policy.finish(...)`.

        Raises:
            DataError: For a row that cannot be used, such as a prompt that fills the context. The error ends the run,
                unless `on_bad_row: skip` leaves out the row. From the second turn on, `policy.generate` raises
                DataError when the context is full. This method must catch that error and finish the attempt.
            AttemptFailedError: If another attempt may succeed. Other exceptions and time-outs count as this error. The
                attempt is retried at most `faults.retries` times. If all retries fail, the prompt is given up.
            SpurlineError: Any other error of this class ends the run.
        """
        ...
