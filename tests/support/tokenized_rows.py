"""Rows in a file, tokenized by either tokenization."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spurline.config.run_config import DataConfig
from spurline.data.token_store import Tokenized
from spurline.protocols.tokenization import DatasetToTokenize
from spurline_collation_fast.configs import ParallelTokenizationConfig
from spurline_collation_fast.tokenization.parallel import ParallelTokenization
from spurline_text.configs import HfDatasetConfig, SequentialTokenizationConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.tokenization import SequentialTokenization

Kind = Literal["sequential", "parallel"]


def tokenized(
    path: Path, tokenizer: PreTrainedTokenizerBase, kind: Kind = "sequential", *, dataset: Any = None, **data: Any
) -> Tokenized:
    """The samples of one file. dataset: settings of the dataset. data: settings of the section `data`."""
    config = HfDatasetConfig(path=str(path), **(dataset or {}))
    settings = DataConfig(train=(config,), **data)
    if kind == "sequential":
        made: Any = SequentialTokenization(SequentialTokenizationConfig(), tokenizer=tokenizer, data=settings)
    else:
        cache = ParallelTokenizationConfig(cache_dir=path.parent / "cache")
        made = ParallelTokenization(cache, tokenizer=tokenizer, data=settings)
    return made.tokenize([DatasetToTokenize(HfDataset(config), config)])
