"""What a batch source is given when it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from spurline.config.run_config import RunConfig
    from spurline.plugins import PluginHost
    from spurline.protocols.collator import ParallelLayout


@dataclass(frozen=True)
class SourceContext:
    """Everything a source may build on.

    host: enabled plugins; create further components with `host.registry.create(kind, config, ...)`, fire hooks with
    `host.hooks`. layout: what the backend's parallelism asks of batches. row_limit: look at no more rows than this of
    each dataset (`spurline plan` on large data); None reads all.
    """

    config: RunConfig
    host: PluginHost
    tokenizer: PreTrainedTokenizerBase
    layout: ParallelLayout
    row_limit: int | None = None
