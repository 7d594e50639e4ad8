"""Settings of the environment `harness`: the agent, its rewards, and the endpoint that it talks to."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.paths import FunctionSetting
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline_rl.functions import FUNCTION_PATH
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.reward import RewardTable

if TYPE_CHECKING:
    from spurline.config.run_config import RunConfig


_EVERY_ADDRESS = ("", "0.0.0.0", "::")
"""Hosts to listen on that no client can connect to by name."""


class HarnessConfig(EnvironmentConfig):
    """Any agent that takes the base URL of an OpenAI-compatible endpoint."""

    serves_requests: ClassVar[bool] = True

    name: str = "harness"
    agent: Annotated[str | None, FunctionSetting(), OnResume.BY_NAME] = Field(default=None, pattern=FUNCTION_PATH)
    """`my_module:my_function` or `file.py:my_function`, which gets a session (base URL, key, row) and returns the
    attempt's rewards."""
    command: tuple[str, ...] | None = Field(default=None, min_length=1)
    """A program with its arguments instead, started for each attempt: the row comes as JSON on its standard input, the
    last line it prints is the rewards as JSON."""
    pass_env: Annotated[tuple[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], ...], OnResume.FREE] = ()
    """Names of environment variables that the program gets besides harmless ones such as PATH, HOME and LANG. Keys and
    tokens are not passed to it otherwise; their values belong in the environment, not here."""
    memory_gb: Annotated[float | None, OnResume.FREE] = Field(default=None, gt=0)
    """GiB of address space that each process of the program may take (RLIMIT_AS); null for no limit."""
    rewards: RewardTable | None = None
    """Reward components that score the agent's answer; then it returns the answer as text, or nothing."""
    history: Literal["exact", "retokenize"] = "exact"
    """`exact`: the prompt of a conversation that goes on begins with the tokens the model saw and wrote; a chat
    template that rewrites them is an error. `retokenize`: each prompt is rendered and encoded anew, as it would be at
    inference."""
    ignore_sampling: bool = False
    """Leave out of account what a request says of temperature, top_p, top_k, penalties and seed, instead of refusing it
    where the run samples differently."""
    max_turns: Annotated[int, OnResume.BY_NAME] = Field(default=128, gt=0)
    """Turns of the model that one attempt may ask for; further requests are refused."""
    model_name: Annotated[str, OnResume.FREE] = Field(default="policy", min_length=1)
    """The model that `/v1/models` lists; requests may name any."""
    host: Annotated[str, OnResume.FREE] = "127.0.0.1"
    """Address to listen on. Others than loopback let other machines in, who need the key all the same."""
    port: Annotated[int, OnResume.FREE] = Field(default=0, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    public_url: Annotated[str | None, OnResume.FREE] = Field(default=None, pattern=r"^https?://[^/]+")
    """How agents reach the endpoint where it is not by host and port: `http://10.0.0.3:8000`."""
    api_key_env: Annotated[str | None, OnResume.FREE] = Field(default=None, min_length=1)
    """Environment variable that holds the key all agents have to show; null gives each session a key of its own."""
    max_body_bytes: Annotated[int, OnResume.FREE] = Field(default=16 * 2**20, gt=0)
    """Largest request. It may have a bracket, brace or colon for each 128 of these bytes, and a comma for each 64."""
    max_buffered_bytes: Annotated[int, OnResume.FREE] = Field(default=512 * 2**20, gt=0)
    """Bytes of requests that are still on their way or being read, of all attempts together; one attempt may have an
    eighth of them, and always one request. Further ones are told to come again."""
    max_prompt_tokens: Annotated[int, OnResume.FREE] = Field(default=2**20, gt=0)
    """Tokens of one prompt at most: longer texts are refused before they are encoded as a whole. Far above the context
    of most models, which has its own limit."""
    max_connections: Annotated[int, OnResume.FREE] = Field(default=4096, gt=0)
    """Open connections, but never more than half of the files that the process may open. Beyond that the one that has
    asked nothing for longest is closed; where all wait for an answer, new ones are told to come again."""
    max_concurrent_requests: Annotated[int, OnResume.FREE] = Field(default=1024, gt=0)
    """Requests under way at the same time, of all attempts together; further ones are told to come again."""
    request_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds that one request may take, waiting for the engine and for an update of the weights included."""

    @property
    def reward_terms(self) -> Collection[str] | None:
        return self.rewards

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if (self.agent is None) == (self.command is None):
            given = "neither is given" if self.agent is None else "both are given"
            yield Problem(
                "agent",
                f"or `command` says what makes an attempt, and {given}. Set agent: my_module:my_function, or "
                "command: [program, argument].",
            )
        for key in ("pass_env", "memory_gb"):
            if self.command is None and getattr(self, key):
                yield Problem(key, "is for programs (`command`); a function runs within the run. Remove it.")
        if self.host in _EVERY_ADDRESS and self.public_url is None:
            yield Problem(
                "public_url",
                f"is missing: host is '{self.host}', where no agent can connect to. Set public_url: "
                "http://ADDRESS:PORT as agents see this machine, and a port.",
            )
