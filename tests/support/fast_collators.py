"""The contract of a backend, trained on batches of core's collators and of the fast ones."""

from __future__ import annotations

from spurline.data.configs import PackedCollatorConfig, PaddedCollatorConfig
from spurline.protocols.collator import Collator, ParallelLayout
from spurline.testing.samples import PAD
from spurline_collation_fast.collators import FastPackedCollator, FastPaddedCollator
from spurline_rl.testing import BackendContract


class WithFastCollators(BackendContract):
    def collators(self, layout: ParallelLayout) -> list[Collator]:
        return [
            *super().collators(layout),
            FastPackedCollator(PackedCollatorConfig(max_tokens=64), PAD, layout),
            FastPaddedCollator(PaddedCollatorConfig(), PAD, layout),
        ]
