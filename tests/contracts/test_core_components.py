"""Core's own components run through the very suites that plugin authors subclass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adapter_contract import AdapterContract
from shown_panels import PANELS

from spurline import load_config
from spurline.data.configs import SerialPrefetchConfig, WholeBatchConfig
from spurline.data.serial_prefetch import SerialPrefetch
from spurline.plugins.host import PluginHost
from spurline.testing import MiniBatchesContract, PluginContract, PrefetchContract, TrackerContract
from spurline.trackers.configs import ConsoleTrackerConfig, JsonlTrackerConfig
from spurline.trackers.console import ConsoleTracker
from spurline.trackers.jsonl import JsonlTracker
from spurline.update.update import WholeBatch
from spurline_insight.report_panel import ReportPanelConfig
from spurline_insight.testing import ReportPanelContract
from spurline_models.losses.configs import CrossEntropyConfig, DynamicFineTuningConfig
from spurline_models.losses.cross_entropy import CrossEntropy, DynamicFineTuning
from spurline_models.testing import LossContract, write_tiny_model, write_tiny_moe_model
from spurline_rl.testing import BackendContract
from spurline_text.configs import SequentialTokenizationConfig
from spurline_text.testing import TokenizationContract
from spurline_text.tokenization import SequentialTokenization

MINIMAL_RUN = load_config({"model": {"path": "unused"}, "data": {"train": "unused.jsonl"}, "steps": 1}).config


class TestCorePlugin(PluginContract):
    plugin_module = "spurline.builtin"

    def load(self) -> PluginHost:
        return PluginHost.load([])


class TestSerial(PrefetchContract):
    def make_prefetch(self, build: Any, last_step: int) -> SerialPrefetch:
        return SerialPrefetch(SerialPrefetchConfig(), build, last_step)


class TestWholeBatch(MiniBatchesContract):
    def make_minibatches(self, layout: Any) -> WholeBatch:
        return WholeBatch(WholeBatchConfig(), MINIMAL_RUN, layout)


class TestSequential(TokenizationContract):
    def make_tokenization(self, tokenizer: Any, data: Any) -> SequentialTokenization:
        return SequentialTokenization(SequentialTokenizationConfig(), tokenizer=tokenizer, data=data)


class TestCrossEntropy(LossContract):
    def make_loss(self) -> CrossEntropy:
        return CrossEntropy(CrossEntropyConfig())


class TestDynamicFineTuning(LossContract):
    def make_loss(self) -> DynamicFineTuning:
        return DynamicFineTuning(DynamicFineTuningConfig())


class TestLocal(BackendContract):
    backend_settings = {"name": "local", "device": "cpu"}


class TestLocalInMicroBatches(BackendContract):
    backend_settings = {"name": "local", "device": "cpu", "max_tokens_per_microbatch": 40, "logits_chunk_tokens": 16}
    keeps_open = True


class TestLocalRecomputingActivations(BackendContract):
    backend_settings = {"name": "local", "device": "cpu", "activation_checkpointing": True, "rows_per_microbatch": 2}


class TestLocalWithTiedWeights(BackendContract):
    backend_settings = {"name": "local", "device": "cpu"}

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


@pytest.mark.slow
class TestLocalWithMastersOnTheHost(BackendContract):
    """In half precision a few digits are right, so that what is compared with fp32 is left out, or compared loosely."""

    backend_settings = {
        "name": "local",
        "device": "cpu",
        "precision": "bf16",
        "weights": "bf16_masters",
        "offload_optimizer": True,
        "max_tokens_per_microbatch": 40,
    }
    gradient_tolerance = 0.1
    step_tolerance = 0.01
    metric_tolerance = 0.05
    test_a_wrong_gradient_scale_would_be_caught = None
    test_weights_have_their_hugging_face_names_and_values = None
    test_uneven_work_gives_what_the_local_backend_gives = None
    test_a_temperature_divides_the_logits_before_their_softmax = None
    test_a_critic_learns_as_that_of_the_local_backend_and_leaves_the_policy_alone = None


class TestLocalWithExperts(BackendContract):
    backend_settings = {"name": "local", "device": "cpu", "max_tokens_per_microbatch": 40}

    @pytest.fixture(scope="class")
    @classmethod
    def tiny_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_moe_model(tmp_path_factory.mktemp("experts"))


class TestLocalAdapters(AdapterContract):
    backend_settings = {"name": "local", "device": "cpu", "lora": {"rank": 4, "alpha": 32.0}}


class TestLocalAdaptersOnSomeLayers(AdapterContract):
    backend_settings = {
        "name": "local",
        "device": "cpu",
        "activation_checkpointing": True,
        "lora": {"rank": 3, "alpha": 16.5, "target_modules": ["q_proj", "lm_head", "down_proj"]},
    }


class TestLocalAdaptersOnExperts(AdapterContract):
    backend_settings = {"name": "local", "device": "cpu", "lora": {"rank": 4, "alpha": 32.0}}

    @pytest.fixture(scope="class")
    @classmethod
    def adapted_model(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_moe_model(tmp_path_factory.mktemp("experts"))


class TestJsonl(TrackerContract):
    def make_tracker(self) -> JsonlTracker:
        return JsonlTracker(JsonlTrackerConfig())


class TestConsole(TrackerContract):
    def make_tracker(self) -> ConsoleTracker:
        return ConsoleTracker(ConsoleTrackerConfig())


class TestPanels(ReportPanelContract):
    @pytest.fixture(autouse=True, params=PANELS)
    def _each_panel(self, request: pytest.FixtureRequest) -> None:
        self._name = request.param

    def make_panel(self) -> Any:
        return PANELS[self._name](ReportPanelConfig(name=self._name))
