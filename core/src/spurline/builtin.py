"""Register core's own components. This is an ordinary plugin module that is loaded first in every run."""

from __future__ import annotations

from spurline.data import configs as data
from spurline.plugins import API_VERSION, ComponentRegistrar, Plugin, hookimpl
from spurline.plugins.registry import CORE
from spurline.protocols.backend import BackendConfig
from spurline.protocols.collator import CollatorConfig
from spurline.protocols.dataset import DatasetConfig
from spurline.protocols.evaluation import EvaluationConfig
from spurline.protocols.loss import LossConfig
from spurline.protocols.minibatches import MiniBatchesConfig
from spurline.protocols.optimizer import OptimizerConfig
from spurline.protocols.order import OrderConfig
from spurline.protocols.prefetch import PrefetchConfig
from spurline.protocols.schedule import ScheduleConfig
from spurline.protocols.source import SourceConfig
from spurline.protocols.tokenization import TokenizationConfig
from spurline.protocols.tracker import TrackerConfig
from spurline.trackers.configs import ConsoleTrackerConfig, JsonlTrackerConfig

PLUGIN = Plugin(CORE, api=API_VERSION)


@hookimpl
def register_components(registry: ComponentRegistrar) -> None:
    registry.add_kind(DatasetConfig, "spurline.protocols.dataset:Dataset")
    registry.add_kind(TokenizationConfig, "spurline.protocols.tokenization:Tokenization")
    registry.add_kind(CollatorConfig, "spurline.protocols.collator:Collator")
    registry.add_kind(OrderConfig, "spurline.protocols.order:Order")
    registry.add_kind(PrefetchConfig, "spurline.protocols.prefetch:Prefetch")
    registry.add_kind(MiniBatchesConfig, "spurline.protocols.minibatches:MiniBatches")
    registry.add_kind(LossConfig, "spurline.protocols.loss:Loss")
    registry.add_kind(EvaluationConfig, "spurline.protocols.evaluation:HeldOutEvaluation")
    registry.add_kind(SourceConfig, "spurline.protocols.source:BatchSource")
    registry.add_kind(OptimizerConfig, "spurline.protocols.optimizer:Optimizer")
    registry.add_kind(ScheduleConfig, "spurline.protocols.schedule:Schedule")
    registry.add_kind(BackendConfig, "spurline.protocols.backend:Backend")
    registry.add_kind(TrackerConfig, "spurline.protocols.tracker:Tracker")
    add = registry.add
    add(data.PaddedCollatorConfig, "spurline.data.collators.reference:PaddedCollator")
    add(data.PackedCollatorConfig, "spurline.data.collators.reference:PackedCollator", default=True)
    add(data.UniformOrderConfig, "spurline.data.orders.epochs:UniformOrder", default=True)
    add(data.SequentialOrderConfig, "spurline.data.orders.epochs:SequentialOrder")
    add(data.LengthGroupedOrderConfig, "spurline.data.orders.epochs:LengthGroupedOrder")
    add(data.CurriculumOrderConfig, "spurline.data.orders.epochs:CurriculumOrder")
    add(data.SerialPrefetchConfig, "spurline.data.serial_prefetch:SerialPrefetch", default=True)
    add(data.WholeBatchConfig, "spurline.update.update:WholeBatch", default=True)
    add(JsonlTrackerConfig, "spurline.trackers.jsonl:JsonlTracker")
    add(ConsoleTrackerConfig, "spurline.trackers.console:ConsoleTracker")
