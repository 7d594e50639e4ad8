"""A rank of the FSDP backend whose model can be made to mix neighbouring tokens, as a convolution would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from spurline_fsdp_backend.rank import FsdpRank
from spurline_models.architecture import decoder_layers
from spurline_models.device_profile import device_profile
from spurline_ranks.group import Place
from spurline_ranks.sequence_sharing import check_sharing


class MixingRank(FsdpRank):
    def __init__(self, place: Place, plain_run: Mapping[str, Any]) -> None:
        super().__init__(place, plain_run, total_updates=8)

    def check(self, mixes: bool) -> None:
        """Whether the model may be shared, as it is or with a layer that adds each token's neighbour."""
        model = self._policy.model
        [layer, *_] = decoder_layers(model.causal)
        handle = layer.register_forward_hook(_add_neighbour) if mixes else None
        try:
            check_sharing(model, device_profile("cpu"), "mixing", half_precision=False)
        finally:
            if handle is not None:
                handle.remove()


def _add_neighbour(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
    return output + output.roll(1, dims=1)
