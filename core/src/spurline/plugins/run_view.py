"""Define the part of a run that hooks may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spurline.config.run_config import RunConfig
    from spurline.protocols.backend import Backend
    from spurline.protocols.host import LoadedView
    from spurline.protocols.prefetch import Prefetch
    from spurline.protocols.source import BatchSource
    from spurline.protocols.stateful import Stateful


@dataclass(frozen=True)
class Warned:
    """One kind of trouble that a run had."""

    kind: str
    """A short name of the trouble."""
    words: str
    """Sentences about the trouble, with its steps."""
    lasts: bool
    """True if the run still had the trouble at its end, or in many of its steps."""


class FolderView(Protocol):
    """Paths of files that the run writes: `spurline.run.directory.RunDirectory`."""

    @property
    def path(self) -> Path: ...

    @property
    def metrics(self) -> Path: ...


@dataclass
class RunState:
    """Progress of a run."""

    step: int = 0
    """The last finished step."""
    saved_step: int = 0
    """Step of the newest complete checkpoint."""
    checkpoint: Path | None = None
    """Folder of the newest complete checkpoint."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the last finished step."""


class RunView(Protocol):
    """A run, as hooks see it. `spurline.run.run.Run` documents each member.

    `source`, `backend` and `tokenizer` exist from `on_run_start` to `on_run_end`, `batches` from the first step on.
    """

    config: RunConfig
    hooks: Any
    source: BatchSource
    backend: Backend
    batches: Prefetch
    tokenizer: PreTrainedTokenizerBase

    @property
    def loaded(self) -> LoadedView: ...

    @property
    def directory(self) -> FolderView: ...

    @property
    def state(self) -> RunState: ...

    @property
    def is_done(self) -> bool: ...

    def keep_state(self, name: str, state: Stateful) -> None: ...

    def evaluate(self, prefix: str) -> dict[str, float]: ...

    def export(self, path: Path | str, *, replace: bool = False) -> Path: ...

    def export_adapter(self, path: Path | str, *, replace: bool = False) -> Path: ...

    def request_stop(self, reason: str) -> None: ...

    def warn(self, step: int, kind: str, words: str) -> None: ...

    def add_judge(self, judge: Callable[[], Sequence[Warned]]) -> None: ...
