"""Write responses of models that remember more of earlier tokens than keys and values, each on its own.

Place on the way: that of `Decoder`, for linear attention, state spaces and convolutions, and for attention that
`KvCache` does not compute (softcaps, sinks, chunks). Each response has a cache made by transformers and a pass of its
own for every token, so it never depends on its neighbours.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from torch import Tensor

from spurline_models.streams.stream_model import library_attention
from spurline_rl.engines.in_process.decoder import Decoder
from spurline_rl.engines.in_process.response import Response

_CACHES = ("past_key_values", "cache_params")
"""Names of the cache among the arguments and outputs of models."""


class OwnCacheDecoder(Decoder):
    """A `Decoder` whose passes are of one response, with a cache of the model's own kind."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings, rows_per_pass=1)
        # By `id` of the response.
        self._caches: dict[int, dict[str, Any]] = {}

    @property
    def attention(self) -> str:
        return library_attention(self.model.causal)

    def step(self, version: int) -> None:
        for response in self.responses:
            last = self._read(response, response.tokens[-1:], self._caches[id(response)], response.cached_tokens)
            self._write([response], last, version)

    def free_cache(self) -> None:
        self._caches.clear()
        super().free_cache()

    def _read_prompts(self, responses: Sequence[Response], start: int, version: int) -> None:
        read: list[int] = []
        state: Tensor | None = None
        first = responses[0]
        for response in responses:
            context = response.context
            if state is None or context != read:
                read, first = context, response
                self._caches[id(response)] = {}
                state = self._read(response, context, self._caches[id(response)], 0)
            else:
                # Attempts at one prompt read it once.
                self._caches[id(response)] = copy.deepcopy(self._caches[id(first)])
                response.experts = copy.deepcopy(first.experts)
            self._write([response], state, version)

    def _remove(self, slots: Sequence[int]) -> list[Response]:
        removed = super()._remove(slots)
        for response in removed:
            self._caches.pop(id(response), None)
        return removed

    def _read(self, response: Response, tokens: Sequence[int], cache: dict[str, Any], before: int) -> Tensor:
        """Return the last hidden state [1, H] after these tokens and `before` cached ones. Changes the cache."""
        noting = nullcontext() if self._routing is None else self._routing.noting()
        with self.model.computing(), noting as noted:
            output = self._run_decoder(input_ids=self._send(np.array(tokens))[None], use_cache=True, **cache)
        cache.update({name: output[name] for name in _CACHES if output.get(name) is not None})
        if self._routing is not None and noted is not None:
            response.experts.add(before, self._routing.as_array(noted))
        return output.last_hidden_state[:, -1]
