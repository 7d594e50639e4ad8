"""The controller's side of the FSDP backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, cast

from torch import Tensor

from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_ranks.backend import RankBackend


class FsdpBackend(RankBackend):
    """A `Backend` that implements `Generates`, `MakesBuckets`, `TrainsAdapters` and `YieldsDevice`."""

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        self._check_device_here("asked for continuations")
        if cast(FsdpBackendConfig, self._config).expert > 1:
            # Each decoding step sends tokens to experts in other ranks, so all ranks decode the same prompts.
            shares = [[list(prompt) for prompt in prompts]] * self._ranks.size
            return self._ranks.call("generate", max_new_tokens, per_rank=shares)[0]
        # Each rank gets both short and long prompts.
        by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        dealt = [by_length[rank :: self._ranks.size] for rank in range(self._ranks.size)]
        shares = [[list(prompts[number]) for number in numbers] for numbers in dealt]
        answers = self._ranks.call("generate", max_new_tokens, per_rank=shares)
        numbered = zip(chain(*dealt), chain(*answers), strict=True)
        return [answer for _, answer in sorted(numbered, key=lambda pair: pair[0])]

    def adapter_settings(self) -> Mapping[str, Any] | None:
        return self._ranks.call("adapter_settings")[0]

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._named("adapter")
