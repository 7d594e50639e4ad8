"""Settings of the environments `harness` and `verifiers`, and of the endpoint that agents talk to."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.dataset import DatasetConfig
from spurline_environments.configs import AutoFormatConfig, ToolFormatSetting
from spurline_rl.functions import FUNCTION_PATH, FunctionSetting
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.reward import RewardTable

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


class EndpointConfig(EnvironmentConfig):
    """Base of the configs of environments that serve the model at the recording endpoint."""

    tool_format: ToolFormatSetting = AutoFormatConfig()
    """How the model writes tool calls and reasoning. `auto` finds the format in the chat template."""
    history: Literal["exact", "retokenize"] = "exact"
    """`exact`: the prompt of a later turn begins with the exact tokens of the turns before it. If the chat template
    changes what an earlier turn says, the conversation forks. `retokenize`: each prompt is encoded again."""
    ignore_sampling: bool = False
    """Ignore the temperature, top_p, top_k, penalties and seed of a request. If false, a request that asks for
    sampling different from the run's is refused."""
    max_turns: Annotated[int, OnResume.BY_NAME] = Field(default=128, gt=0)
    """Maximum number of turns of the model in one attempt. Further requests are refused."""
    host: Annotated[str, OnResume.FREE] = "127.0.0.1"
    """Address to listen on. Other machines can connect to an address that is not loopback; they need the key too."""
    port: Annotated[int, OnResume.FREE] = Field(default=0, ge=0, le=65535)
    """Port to listen on. With 0, the system chooses a free one."""
    public_url: Annotated[str | None, OnResume.FREE] = Field(default=None, pattern=r"^https?://[^/]+")
    """The address that agents get instead of host and port, such as `http://10.0.0.3:8000`."""
    max_body_bytes: Annotated[int, OnResume.FREE] = Field(default=4 * 2**20, gt=0)
    """Limit of a request's bytes. Brackets, braces, colons and commas together may be at most 1/16 of this number."""
    request_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds that one request may take. This includes waiting for the engine and for an update of the weights."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.host in ("", "0.0.0.0", "::") and self.public_url is None:
            yield Problem(
                "public_url",
                f"is missing, and agents cannot connect to host '{self.host}'. Set public_url: http://ADDRESS:PORT "
                "with this machine's address, and a port.",
            )


class HarnessConfig(EndpointConfig):
    """An agent that talks to the model through the API of OpenAI or Anthropic. It gets the endpoint's base URL."""

    retired: ClassVar[tuple[str, ...]] = (
        "max_buffered_bytes",
        "max_prompt_tokens",
        "max_connections",
        "max_concurrent_requests",
        "api_key_env",
        "model_name",
    )

    name: str = "harness"
    agent: Annotated[str | None, FunctionSetting(), OnResume.BY_NAME] = Field(default=None, pattern=FUNCTION_PATH)
    """The agent: `my_module:my_function` or `file.py:my_function`. It gets a session (base URL, key, row) and returns
    the attempt's rewards."""
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """A program with its arguments, instead of `agent`. It is started for each attempt, and reads a JSON object with
    the row from its standard input. The last line that it prints must be the rewards as JSON."""
    pass_env: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], ...], OnResume.FREE] = ()
    """Names of environment variables that the program gets, besides harmless ones such as PATH, HOME and LANG. It gets
    no other variables, since they may contain keys and tokens."""
    memory_gb: Annotated[float | None, OnResume.FREE] = Field(default=None, gt=0)
    """GiB of address space that each process of the program may take (RLIMIT_AS). If null, there is no limit."""
    rewards: RewardTable | None = None
    """Reward components that score the agent's answer. The agent then returns the answer as text, or nothing."""

    @property
    def reward_terms(self) -> Collection[str] | None:
        return self.rewards

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if (self.agent is None) == (self.command is None):
            given = "Neither is given" if self.agent is None else "Both are given"
            yield Problem(
                "agent",
                f"or `command` is needed, not both. {given}. Set agent: my_module:my_function, or command: [program, "
                "argument].",
            )
        for key in ("pass_env", "memory_gb"):
            if self.command is None and getattr(self, key):
                yield Problem(key, "is for programs (`command`), and this agent is a function. Remove it.")
        yield from super().problems(run)


class VerifiersConfig(EndpointConfig):
    """An environment of the library verifiers: a taskset, its rewards, and the agents that play it."""

    name: str = "verifiers"
    taskset: Annotated[str, FunctionSetting(), OnResume.BY_NAME] = Field(min_length=1)
    """The taskset: the id of an installed package, such as `textarena`, or a class of your own, as `module:Class` or
    `file.py:Class`."""
    arguments: Annotated[dict[str, Any], OnResume.BY_NAME] = {}
    """Settings of the taskset."""
    env: Annotated[dict[str, Any], OnResume.BY_NAME] = {}
    """Other settings of the library's block `env`, such as `{agent: {max_turns: 4}}`."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if "taskset" in self.env:
            yield Problem("env.taskset", "is written as `taskset` and `arguments` of this environment. Move it there.")
        yield from super().problems(run)


class VerifiersRowsConfig(DatasetConfig):
    """The tasks of a taskset of the library verifiers, one row each."""

    name: str = "verifiers"
    taskset: Annotated[str, FunctionSetting(), OnResume.BY_NAME] = Field(min_length=1)
    """The taskset, as in the environment `verifiers`."""
    arguments: Annotated[dict[str, Any], OnResume.BY_NAME] = {}
    """Settings of the taskset."""
    skip: int = Field(default=0, ge=0)
    """Tasks to leave out at the beginning."""
    limit: int | None = Field(default=None, gt=0)
    """Largest number of tasks. A taskset without an end needs it."""
    constants: dict[str, str | int | float | bool] = {}
    """Columns with the same value in all rows, such as `{environment: reverse}`."""

    @property
    def place(self) -> str:
        return self.label or self.taskset.rpartition(":")[2]
