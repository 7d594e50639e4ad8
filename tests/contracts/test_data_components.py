"""Core's datasets, collators and orders run through the suites that plugin authors subclass."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spurline.data.collators.reference import PackedCollator, PaddedCollator
from spurline.data.configs import (
    CurriculumOrderConfig,
    LengthGroupedOrderConfig,
    PackedCollatorConfig,
    PaddedCollatorConfig,
    SequentialOrderConfig,
    UniformOrderConfig,
)
from spurline.data.orders.epochs import CurriculumOrder, LengthGroupedOrder, SequentialOrder, UniformOrder
from spurline.protocols.dataset import Dataset
from spurline.protocols.order import SampleFacts
from spurline.testing import CollatorContract, OrderContract
from spurline_rl.configs import RolloutsCollatorConfig
from spurline_rl.reward_adaptive import RewardAdaptiveOrder
from spurline_rl.rollout_batches import RolloutsCollator
from spurline_rl.testing import AdaptiveOrderContract, RolloutCollatorContract
from spurline_rl.training_configs import RewardAdaptiveOrderConfig
from spurline_text.configs import HfDatasetConfig
from spurline_text.datasets.hf_dataset import HfDataset
from spurline_text.testing import DatasetContract


class TestJsonLines(DatasetContract):
    def make_dataset(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "rows.jsonl").write_text(text, encoding="utf-8")
        return HfDataset(HfDatasetConfig(path=str(folder / "rows.jsonl")))

    def make_damaged(self, folder: Path) -> Dataset:
        (folder / "rows.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n{"prompt": "b"}\n', encoding="utf-8")
        return HfDataset(HfDatasetConfig(path=str(folder / "rows.jsonl")))


class TestParquet(DatasetContract):
    def make_dataset(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), folder / "rows.parquet")
        return HfDataset(HfDatasetConfig(path=str(folder / "rows.parquet")))


class TestSeveralFiles(DatasetContract):
    def make_dataset(self, folder: Path, rows: Sequence[Mapping[str, Any]]) -> Dataset:
        for number, part in enumerate((rows[:4], rows[4:])):
            (folder / f"part-{number}.json").write_text(json.dumps(list(part)), encoding="utf-8")
        return HfDataset(HfDatasetConfig(path=f"{folder}/*.json"))


class Made:
    """Makes the collator of a subclass: `collator`, with the settings `config`."""

    collator: Any
    config: Any

    def make_collator(self, pad_token_id: int, layout: Any) -> Any:
        return self.collator(self.config, pad_token_id, layout)


class TestPaddedRight(Made, CollatorContract):
    collator, config = PaddedCollator, PaddedCollatorConfig()


class TestPaddedLeft(Made, CollatorContract):
    collator, config = PaddedCollator, PaddedCollatorConfig(pad_side="left", pad_to_multiple_of=8)


class TestPacked(Made, CollatorContract):
    collator, config = PackedCollator, PackedCollatorConfig(max_tokens=128)


class TestPackedAligned(Made, CollatorContract):
    collator, config = PackedCollator, PackedCollatorConfig(max_tokens=256, align_to=8, pad_to_max=True)


class TestPackedMultifit(Made, CollatorContract):
    collator, config = PackedCollator, PackedCollatorConfig(max_tokens=128, algorithm="multifit")


class TestRolloutsAsSamples(Made, CollatorContract):
    collator, config = RolloutsCollator, RolloutsCollatorConfig()


class TestRolloutsRight(Made, RolloutCollatorContract):
    collator, config = RolloutsCollator, RolloutsCollatorConfig()


class TestRolloutsLeft(Made, RolloutCollatorContract):
    collator, config = RolloutsCollator, RolloutsCollatorConfig(pad_side="left")


class AnyOrder(OrderContract):
    """Makes the order of a subclass: `order`, with the settings `config`."""

    order: Any
    config: Any

    def make_order(self, samples: SampleFacts, seed: int) -> Any:
        return self.order(self.config, samples=samples, seed=seed)


class TestUniform(AnyOrder):
    order, config = UniformOrder, UniformOrderConfig()


class TestSequential(AnyOrder):
    order, config = SequentialOrder, SequentialOrderConfig()


class TestLengthGrouped(AnyOrder):
    order, config = LengthGroupedOrder, LengthGroupedOrderConfig(pool_batches=2)


class TestCurriculum(AnyOrder):
    order, config = CurriculumOrder, CurriculumOrderConfig(column="difficulty")


class TestCurriculumInStages(AnyOrder):
    order = CurriculumOrder
    config = CurriculumOrderConfig(column="meta.difficulty", direction="descending", stages=3)

    def row(self, number: int) -> Mapping[str, Any]:
        return {"meta": super().row(number)}


class TestRewardAdaptive(AdaptiveOrderContract):
    def make_order(self, samples: SampleFacts, seed: int) -> RewardAdaptiveOrder:
        return RewardAdaptiveOrder(RewardAdaptiveOrderConfig(), samples=samples, seed=seed)


class TestRewardAdaptiveByName(AdaptiveOrderContract):
    def make_order(self, samples: SampleFacts, seed: int) -> RewardAdaptiveOrder:
        config = RewardAdaptiveOrderConfig(reward="reward", floor=0.5)
        return RewardAdaptiveOrder(config, samples=samples, seed=seed)
