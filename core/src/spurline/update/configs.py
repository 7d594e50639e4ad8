"""Settings of the ways to cut a batch into optimizer steps. Light: imports no torch."""

from __future__ import annotations

from spurline.protocols.minibatches import MiniBatchesConfig


class WholeBatchConfig(MiniBatchesConfig):
    """One optimizer step per batch."""

    name: str = "whole"

    def minibatch_prompts(self, prompts_per_step: int) -> int:
        return prompts_per_step
