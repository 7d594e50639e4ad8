"""A backend says in its config what it can besides training; a run that needs more is refused before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_plugins import FakePlugins

from spurline.config.loading import LoadedConfig, load_config
from spurline.errors import ConfigError
from spurline.plugins.registry import ComponentRegistrar
from spurline.protocols.backend import BackendConfig, BackendFacts
from spurline.protocols.ranks import Launch, RankRequest
from spurline_rl.engines.configs import InProcessEngineConfig
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig

SFT = {"plugins": ["ranks"], "model": {"path": "unused"}, "data": {"train": "unused.jsonl"}, "steps": 1}
ROLLOUTS = {
    **SFT,
    "source": {
        "name": "rollouts",
        "environment": {"name": "single_turn", "rewards": "exact_match"},
        "engine": "in_process",
    },
}
ANSWERS = {
    "data": {"train": "unused.jsonl", "eval": "unused.jsonl"},
    "evaluation": {"generate": {"rewards": {"exact": "exact_match"}}},
}


class PlainBackendConfig(BackendConfig):
    """Trains, and nothing else."""

    name: str = "plain"


class AbleBackendConfig(PlainBackendConfig):
    """Says that it can do everything."""

    name: str = "able"

    @property
    def facts(self) -> BackendFacts:
        return BackendFacts(generates=True, lends_model=True)


class RanksBackendConfig(PlainBackendConfig):
    """Has ranks, each with a GPU."""

    name: str = "ranks"
    launch: Launch = "local"
    gpus: tuple[int, ...] | None = None

    def rank_request(self) -> RankRequest:
        return RankRequest(2, "cuda", self.launch, gpus=self.gpus)


class BorrowerConfig(RolloutEngineConfig):
    """Generates with the backend's own model, and with nothing else."""

    name: str = "borrower"
    borrows_model = True


@pytest.fixture
def load() -> Iterator[Any]:
    def register(registry: ComponentRegistrar) -> None:
        registry.add(PlainBackendConfig, "nowhere:Plain")
        registry.add(AbleBackendConfig, "nowhere:Able")
        registry.add(RanksBackendConfig, "nowhere:Ranks")
        registry.add(BorrowerConfig, "nowhere:Borrower")

    with FakePlugins() as plugins:
        available = plugins.add("ranks", register=register)

        def load_run(settings: dict[str, Any], backend: Any) -> LoadedConfig:
            return load_config({**settings, "backend": backend}, available=available)

        yield load_run


def test_answers_to_held_out_prompts_need_a_backend_that_generates(load: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"evaluation\.generate needs answers, but backend 'plain' does not"
    ) as raised:
        load(SFT | ANSWERS, "plain")
    assert "Remove evaluation.generate" in str(raised.value)
    load(SFT | ANSWERS, "able")


def test_an_engine_that_can_only_borrow_the_model_needs_a_backend_that_lends_it(load: Any) -> None:
    borrowing = {**ROLLOUTS, "source": {**ROLLOUTS["source"], "engine": "borrower"}}
    with pytest.raises(ConfigError, match=r"source\.engine\.name is borrower.*'plain' does not hold all of it"):
        load(borrowing, "plain")
    load(borrowing, "able")


@pytest.mark.parametrize(
    ("ranks", "device"),
    [({}, "cpu"), ({"gpus": [1, 0]}, "cpu"), ({"gpus": [1, 2]}, "auto"), ({"launch": "ray"}, "cpu")],
)
def test_a_copy_is_on_no_gpu_of_a_rank(load: Any, ranks: dict[str, Any], device: str) -> None:
    run = load(ROLLOUTS, {"name": "ranks", **ranks}).config
    assert InProcessEngineConfig().copy_device(run) == device
    assert InProcessEngineConfig().copy_device(load(ROLLOUTS, "plain").config) == "auto"


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ({}, r"source\.engine\.device is cuda.*the first GPU, which a rank uses.*backend\.gpus"),
        ({"launch": "ray"}, r"source\.engine\.device is cuda.*Ray.*cpu"),
    ],
)
def test_a_copy_on_the_gpu_of_a_rank_is_refused(load: Any, ranks: dict[str, Any], said: str) -> None:
    on_gpu = {**ROLLOUTS, "source": {**ROLLOUTS["source"], "engine": {"name": "in_process", "device": "cuda"}}}
    with pytest.raises(ConfigError, match=said):
        load(on_gpu, {"name": "ranks", **ranks})
    load(on_gpu, {"name": "ranks", "gpus": [2, 1]})
