"""Kind `scorer`: look at each finished group, and add columns or other prompts to it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from spurline_rl.draws import Draw
    from spurline_rl.trajectory import Group


class ScorerConfig(ComponentConfig):
    """Settings of a scorer."""

    kind: ClassVar[str] = "scorer"

    @property
    def columns(self) -> Collection[str]:
        """Return the names of the columns that the scorer adds to batches (`Group.token_columns`)."""
        return ()


class Scorer(Protocol):
    """Add to a group what it lacks after its attempts have ended, such as the logprobs of a model that is served.

    Factory: `Class(config, run=RunConfig, tokenizer=PreTrainedTokenizerBase)`. A scorer that holds connections or files
    also has `close()`, which may be a coroutine.
    """

    async def score(self, group: Group, prompt: Draw) -> Group:
        """Return the group with `token_columns` or `prompts`, which are the only fields that may differ.

        It is awaited on the event loop of the rollouts, at the same time for several groups, and must not block it.
        Held-out attempts are not scored.

        Raises:
            AttemptFailedError: If the group cannot be scored. The prompt is then given up.
        """
        ...
