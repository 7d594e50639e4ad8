"""A backend that answers what a run asks and nothing else: a plan and `spurline doctor` say nothing of its memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spurline.config.run_config import RunConfig
from spurline.errors import UserError
from spurline.protocols.backend import BackendConfig, BackendFacts
from spurline_models.backend_config import ModelBackendConfig, adapters_of
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_planning.fit import Load, layout_lines, memory_lines, phase_lines
from spurline_planning.protocols import Diagnoses, PlansLayouts, PlansMemory
from spurline_ranks.configs import RankBackendConfig

DEVICE = 1 << 34


class PlainConfig(BackendConfig):
    name: str = "plain"


def run_of(backend: BackendConfig) -> RunConfig:
    return RunConfig.model_construct(backend=backend)


def test_a_plan_says_nothing_of_memory_that_the_backend_does_not_know() -> None:
    run, load = run_of(PlainConfig()), Load(row_length=8, tokens=64)
    for lines in (memory_lines, layout_lines, phase_lines):
        assert lines(run, load, DEVICE) == lines(run, load, None) == []


@pytest.mark.parametrize(
    ("backend", "answers"),
    [
        (PlainConfig(), ()),
        (ModelBackendConfig(name="own"), (PlansMemory,)),
        (LocalBackendConfig(), (PlansMemory,)),
        (RankBackendConfig(name="own"), (PlansMemory, PlansLayouts, Diagnoses)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BackendConfig) else "",
)
def test_a_backend_is_asked_what_its_settings_have_methods_for(
    backend: BackendConfig, answers: tuple[Any, ...]
) -> None:
    assert tuple(kind for kind in (PlansMemory, PlansLayouts, Diagnoses) if isinstance(backend, kind)) == answers


def test_only_a_backend_of_models_has_adapters() -> None:
    assert adapters_of(run_of(PlainConfig())) is None
    assert adapters_of(run_of(LocalBackendConfig())) is None
    lora = LoraConfig(rank=2, dropout=0.5)
    adapted = LocalBackendConfig(lora=lora)
    assert adapters_of(run_of(adapted)) == lora
    assert adapted.facts.trains_adapters
    assert adapted.facts.dropout_rates == {"lora.dropout": 0.5}


def test_a_backend_without_models_can_do_nothing_besides_training_and_refuses_to_export() -> None:
    config, nothing = PlainConfig(), None
    assert config.facts == BackendFacts()
    run: Any = run_of(config)
    config.check_trainable(run)
    assert list(config.check_lengths(nothing, nothing, ())) == []  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"Backend 'plain' cannot export.*checkpoint\.export_hf"):
        config.export(nothing, nothing, nothing, Path("out"), replace=True)  # type: ignore[arg-type]
