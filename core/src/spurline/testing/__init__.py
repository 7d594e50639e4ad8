"""The contract kit: a test suite for each kind of core component. Subclass a suite, return your component, run pytest.

    from spurline.testing import CollatorContract

    class TestMyCollator(CollatorContract):
        def make_collator(self, pad_token_id, layout):
            return MyCollator(MyConfig(), pad_token_id=pad_token_id, layout=layout)

The docstring of each suite says what a subclass provides, and which attributes it may set. Further suites are in
`spurline_text.testing`, `spurline_models.testing` (losses, sources, optimizers, schedules), `spurline_rl.testing`
(components of RL, and backends) and `spurline_insight.testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spurline.testing.lazy import lazy_names

if TYPE_CHECKING:
    from spurline.testing.collator_contract import CollatorContract as CollatorContract
    from spurline.testing.minibatches_contract import MiniBatchesContract as MiniBatchesContract
    from spurline.testing.order_contract import OrderContract as OrderContract
    from spurline.testing.plugin_contract import PluginContract as PluginContract
    from spurline.testing.plugin_contract import TrackerContract as TrackerContract
    from spurline.testing.prefetch_contract import PrefetchContract as PrefetchContract
    from spurline.testing.samples import make_store as make_store

_NAMES = {
    "collator_contract": ("CollatorContract",),
    "minibatches_contract": ("MiniBatchesContract",),
    "order_contract": ("OrderContract",),
    "plugin_contract": ("PluginContract", "TrackerContract"),
    "prefetch_contract": ("PrefetchContract",),
    "samples": ("make_store",),
}

__all__, __getattr__, __dir__ = lazy_names(__name__, _NAMES)  # pyright: ignore[reportUnsupportedDunderAll]
