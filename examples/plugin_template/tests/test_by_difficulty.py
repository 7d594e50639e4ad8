"""Test that the order fulfils Spurline's contract and follows its settings."""

from __future__ import annotations

from spurline import load_config
from spurline.plugins.host import InstalledPlugin
from spurline.protocols.order import SampleFacts
from spurline.testing import OrderContract
from spurline_plugin_template.by_difficulty import ByDifficulty
from spurline_plugin_template.config import ByDifficultyConfig

AVAILABLE = {
    "plugin_template": InstalledPlugin("plugin_template", "spurline_plugin_template.plugin", "under-test", "0")
}


def test_a_config_takes_the_order_by_its_name() -> None:
    settings = {
        "plugins": ["plugin_template"],
        "model": {"path": "any"},
        "data": {"train": "any.jsonl", "order": "by_difficulty"},
        "steps": 100,
    }
    order = load_config(settings, available=AVAILABLE).config.data.order
    assert order.model_dump() == {"name": "by_difficulty", "column": "difficulty", "sorted_epochs": 1}


class TestByDifficulty(OrderContract):
    config = ByDifficultyConfig(column="difficulty", sorted_epochs=2)

    def make_order(self, samples: SampleFacts, seed: int) -> ByDifficulty:
        return ByDifficulty(self.config, samples=samples, seed=seed)

    def test_difficulty_rises_in_the_first_epochs_and_not_later(self) -> None:
        samples = self.samples(([40], [1.0], 4))
        difficulty, order = samples.columns.numbers("difficulty"), self.make_order(samples, 1)
        epochs = [difficulty[order.positions(40 * epoch, 40 * epoch + 40)].tolist() for epoch in range(3)]
        assert [epoch == sorted(epoch) for epoch in epochs] == [True, True, False]
