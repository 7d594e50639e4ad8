"""Kind `tokenization`: dataset rows become a TokenStore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from spurline.data.token_store import TokenStore
    from spurline.protocols.dataset import Dataset, DatasetConfig


class TokenizationConfig(ComponentConfig):
    """Settings of a tokenization."""

    kind: ClassVar[str] = "tokenization"


@dataclass(frozen=True)
class DatasetToTokenize:
    """A dataset with the settings that say how its rows are read."""

    dataset: Dataset
    config: DatasetConfig


@dataclass(frozen=True)
class Tokenized:
    """The usable samples, and how many were left out or cut and why.

    dropped: reason -> samples left out. truncated: samples cut to `max_length`.
    examples: reason -> location of the first sample it happened to.
    ignored: what the chat template leaves out -> samples that are trained on without it (`data.on_ignored: warn`).
    summary: what `spurline.data.token_store.summarize` would find, when it is known already; it is then not looked for.
    notes: lines to show the user when the run starts, such as why a cache was rebuilt.
    """

    store: TokenStore
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    truncated: int = 0
    examples: Mapping[str, str] = field(default_factory=dict[str, str])
    ignored: Mapping[str, int] = field(default_factory=dict[str, int])
    summary: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()


class Tokenization(Protocol):
    """Tokenize rows and decide which tokens carry loss.

    Factory: `Class(config, tokenizer=PreTrainedTokenizerBase, data=DataConfig)`.
    Samples keep the order of the datasets and rows. Deterministic. Every implementation gives the same store for the
    same input. Raises DataError naming file, row and field of a malformed row, unless `on_bad_row: skip`.
    """

    def tokenize(self, datasets: Sequence[DatasetToTokenize]) -> Tokenized:
        """All samples of all datasets. A sample without a loss token is left out and counted."""
        ...
