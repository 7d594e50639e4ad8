"""Kind `tokenization`: dataset rows become a TokenStore."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spurline.data.token_store import Tokenized
    from spurline.protocols.dataset import Dataset, DatasetConfig


class TokenizationConfig(ComponentConfig):
    """Settings of a tokenization."""

    kind: ClassVar[str] = "tokenization"

    @property
    def cache_folder(self) -> Path | None:
        """Return the folder in which tokens are kept for later runs, or None if they are not kept."""
        return None

    def load_tokenizer(self, model: Any) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the run.

        Raises:
            ModelError: If `model` has no tokenizer.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tokenizer: override load_tokenizer")

    def notes(self, model: Any, tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
        """Return sentences for the start of a run, about a chat template that does not fit the tokenizer."""
        return ()


@dataclass(frozen=True)
class DatasetToTokenize:
    """A dataset with the settings that say how its rows are read."""

    dataset: Dataset
    config: DatasetConfig


class Tokenization(Protocol):
    """Tokenize rows and decide which tokens carry loss.

    Factory: `Class(config, tokenizer=PreTrainedTokenizerBase, data=DataConfig)`.
    Samples keep the order of the datasets and rows. Every implementation returns the same store for the same input.
    Raises DataError naming file, row and field of a malformed row, unless `on_bad_row: skip`.
    """

    def tokenize(self, datasets: Sequence[DatasetToTokenize]) -> Tokenized:
        """Tokenize all samples of all datasets. A sample without a loss token is left out and counted."""
        ...
