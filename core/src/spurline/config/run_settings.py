"""Define the settings of a run that a section of its config may read.

`RunConfig` is the only implementation. Base classes of sections and components cannot import it, since it is made of
them, so they annotate `run: RunSettings`; a plugin's own sections annotate `run: RunConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class ModelSettings(Protocol):
    """The model that is trained: `spurline.config.run_config.ModelConfig`."""

    path: str
    revision: str | None
    tokenizer: str | None
    chat_template: str | None
    trust_remote_code: bool
    config_overrides: dict[str, Any]


class RunSettings(Protocol):
    """The settings of a whole run.

    Sections and components are given as Any: their base classes are what reads this.
    """

    run_dir: Path
    seed: int
    batch_size: int
    steps: int | None
    epochs: float | None
    data: Any
    source: Any
    collator: Any
    minibatches: Any
    loss: Any
    optimizer: Any
    backend: Any
    evaluation: Any
    checkpoint: Any

    @property
    def model(self) -> ModelSettings: ...

    @property
    def evaluations(self) -> Mapping[str, Any]: ...

    def find_section(self, kind: type[Any]) -> Any:
        """Return the top-level section of this class, which a plugin added; None where there is none."""
        ...
