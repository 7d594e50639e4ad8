"""Source `preference`: pairs of a chosen and a rejected answer, in an order that depends only on seed and epoch."""

from __future__ import annotations

from collections.abc import Mapping

from spurline.builtin.preference_configs import PreferenceSourceConfig
from spurline.builtin.sft_source import SftSource
from spurline.data.pair_set import PairSet
from spurline.protocols.samples import Samples
from spurline.run_context import SourceContext


class PreferenceSource(SftSource):
    """As `sft`, with pairs for samples: as pure, as resumable, built ahead as well."""

    def __init__(self, config: PreferenceSourceConfig, context: SourceContext) -> None:
        self._context = context
        super().__init__(config, context, PairSet(context.config.data.train, context))

    def summary(self) -> Mapping[str, object]:
        return {**super().summary(), "step_of": f"{self._batch_size} pairs"}

    def held_out(self) -> Samples:
        """The pairs of `data.eval`."""
        return PairSet(self._context.config.data.eval, self._context)
