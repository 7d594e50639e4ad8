"""Define the view of a run that hooks are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import pandas  # pyright: ignore[reportMissingTypeStubs]
    from transformers import PreTrainedTokenizerBase

    from spurline.config.run_config import RunConfig
    from spurline.protocols.backend import Backend
    from spurline.protocols.host import LoadedView
    from spurline.protocols.prefetch import Prefetch
    from spurline.protocols.source import BatchSource
    from spurline.protocols.stateful import Stateful


@dataclass(frozen=True)
class Warned:
    """One kind of trouble that a run had.

    kind: short name. words: sentences, with the steps that had it. lasts: whether it belongs to how the run ended, and
    did not just pass by.
    """

    kind: str
    words: str
    lasts: bool


class FolderView(Protocol):
    """Paths of what the run writes: `spurline.run.directory.RunDirectory`."""

    @property
    def path(self) -> Path: ...

    @property
    def metrics(self) -> Path: ...


class StateView(Protocol):
    """How far the run is: `spurline.run.endings.ending.RunState`."""

    step: int
    """The last finished step."""
    metrics: Mapping[str, float]
    """Metrics of that step."""
    checkpoint: Path | None
    """The newest checkpoint that is complete."""


class RunView(Protocol):
    """A run, as hooks see it: `spurline.run.run.Run`, whose docstrings say what each member is and raises.

    Attributes:
        source: There from `on_run_start` to `on_run_end`, as are backend, tokenizer and, from the first step on,
            batches.
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
    def state(self) -> StateView: ...

    @property
    def is_done(self) -> bool: ...

    def keep_state(self, name: str, state: Stateful) -> None: ...

    def evaluate(self, prefix: str) -> dict[str, float]: ...

    def export(self, path: Path | str, *, replace: bool = False) -> Path: ...

    def export_adapter(self, path: Path | str, *, replace: bool = False) -> Path: ...

    def metrics_frame(self) -> pandas.DataFrame: ...

    def request_stop(self, reason: str) -> None: ...

    def warn(self, step: int, kind: str, words: str) -> None: ...

    def add_judge(self, judge: Callable[[], Sequence[Warned]]) -> None: ...
