"""Let one run at a time use a vLLM server, and notice when another server answers under its URL.

Two runs that publish to one server would train on tokens of each other's weights. So a run claims the server: all calls
to its workers carry the name of the run, and each call extends the claim by LEASE_S. The run counts this time from
before it sends the call, and the server from when it gets the call, so the claim ends first for the run. The run trusts
the server only until then. So no token that it trusts comes from the weights of another run, even if the run was
stopped for a while.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from spurline.errors import ConfigError, SpurlineError
from spurline.terminal import tell
from spurline_async_rl.engines.member import EngineDiedError

LEASE_S = 60.0
"""Seconds that a claim lasts. If a run is killed, only the resumed run can use its servers within this time."""
_ASK_AGAIN_S = 2.0
"""Seconds between two calls that extend a claim."""
_CONNECTIONS = 8
"""Connections over which a run looks for several servers behind one URL."""


class ClaimLostError(EngineDiedError):
    """A server may have lost the weights of this run, because another run used it or it was started again."""


class WorkerClaim:
    """The claim of a run on one worker process of a server."""

    def __init__(self) -> None:
        self._process = uuid.uuid4().hex
        self._owner = ""
        self._number = 0
        self._until = 0.0

    def extend(self, owner: str, lease_s: float) -> dict[str, str | float]:
        """Claim the worker for some seconds.

        Returns:
            Under `claim`, a text that changes when the worker belonged to another run or was started again. If another
            run has the worker, the answer has instead the name of that run under `owner`, and the seconds until its
            claim ends under `rest_s`.
        """
        now = _now()
        if owner != self._owner:
            if self._owner and now < self._until:
                return {"owner": self._owner, "rest_s": self._until - now}
            self._owner, self._number = owner, self._number + 1
        self._until = now + lease_s
        return {"claim": f"{self._process} {self._number}"}

    def end(self, owner: str) -> None:
        """End the claim of this run."""
        if owner == self._owner:
            self._owner = ""


class ServerLease:
    """The claim of this run on one server.

    Args:
        workers: Calls a method of `WorkerExtension`, given by its name and arguments, in every worker of the server.
        url: The URL of the server, for messages.
        owner: The name of the run, for messages of other runs.
    """

    def __init__(self, workers: Callable[..., Awaitable[list[Any]]], url: str, owner: str) -> None:
        self._workers = workers
        self._url = url
        self._owner = owner
        self._claims: Sequence[str] = ()
        self._extended_at = -math.inf
        self._extended = asyncio.Event()

    @property
    def is_valid(self) -> bool:
        """Return whether the claim still lasts, so that no other run can have used the server since the last call."""
        return _now() - self._extended_at < LEASE_S

    async def until_valid(self) -> None:
        """Wait until the claim has been extended, if it has run out."""
        while not self.is_valid:
            self._extended.clear()
            await self._extended.wait()

    async def begin(self) -> None:
        """Claim the server.

        Raises:
            ConfigError: If the server belongs to a run that goes on, or the URL leads to several servers.
        """
        latest_end = math.inf
        while True:
            asked = _now()
            answers = await asyncio.gather(*(self._extend() for _ in range(_CONNECTIONS)))
            others = [answer for workers in answers for answer in workers if "owner" in answer]
            if not others:
                break
            owner, rest_s = others[0]["owner"], max(answer["rest_s"] for answer in others)
            if latest_end == math.inf:
                tell(f"{self._url} belongs to run {owner}. If that run was killed, its claim ends in {rest_s:.0f} s.")
            elif asked + rest_s > latest_end:
                # An earlier answer said that the claim would end sooner, so the other run has extended it since.
                raise self._config_error(
                    f"belongs to run {owner}, which goes on. Two runs would train on tokens of each other's weights. "
                    "Give this run servers of its own, or end the other run."
                )
            latest_end = min(latest_end, _now() + rest_s)
            await asyncio.sleep(min(_ASK_AGAIN_S, rest_s))
        servers = {tuple(answer["claim"] for answer in workers) for workers in answers}
        if len(servers) > 1:
            raise self._config_error(
                f"leads to {len(servers)} servers, as the URL of a load balancer does, so weights would reach only one "
                "of them. List the URL of each server."
            )
        [self._claims] = servers
        self._note_extended(asked)

    async def call(self, method: str = "", *arguments: Any) -> list[Any]:
        """Extend the claim, and call a method in every worker, unless the server belongs to another run by now.

        Raises:
            ClaimLostError: If the server belongs or has belonged to another run, or was started again.
            EngineDiedError: If the server cannot be reached.
            RunFailedError: If the method fails.
        """
        asked = _now()
        answers = await self._extend(method, *arguments)
        for answer, claim in zip(answers, self._claims, strict=True):
            if "owner" in answer:
                raise ClaimLostError(f"{self._url} belongs to run {answer['owner']} by now")
            if answer["claim"] != claim:
                is_same = answer["claim"].split()[0] == claim.split()[0]
                raise ClaimLostError(
                    f"{self._url} {'belonged to another run meanwhile' if is_same else 'was started again'}, so it "
                    "has other weights"
                )
        self._note_extended(asked)
        return [answer["answer"] for answer in answers]

    async def keep(self) -> str:
        """Extend the claim again and again, until the server is gone or has other weights. Return the reason."""
        num_failures = 0
        while True:
            await asyncio.sleep(_ASK_AGAIN_S)
            try:
                await self.call()
            except ClaimLostError as error:
                return str(error)
            except SpurlineError as error:
                # The first failure may be an idle connection that the server has just closed. Errors that a busy
                # server or a proxy answers with are ignored while the claim lasts.
                num_failures += 1
                if not self.is_valid or (isinstance(error, EngineDiedError) and num_failures > 1):
                    return str(error)
            else:
                num_failures = 0

    async def _extend(self, method: str = "", *arguments: Any) -> list[dict[str, Any]]:
        return await self._workers("spurline_call", self._owner, LEASE_S, method, *arguments)

    def _note_extended(self, at: float) -> None:
        self._extended_at = max(self._extended_at, at)
        self._extended.set()

    def _config_error(self, text: str) -> ConfigError:
        return ConfigError.at("source.engine.urls", f"names {self._url}, which {text}")


def _now() -> float:
    """Return the seconds of a clock that also runs while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
