"""Ranks read the run and the objective from plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from spurline import load_config
from spurline.errors import ConfigError, PluginError
from spurline.plugins.host import PluginHost
from spurline.protocols.loss import Objective, TokenLossInputs
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_ranks.messages import plain_objective, plain_run, read_objective, read_run
from spurline_rl.losses.algorithms import Ppo
from spurline_rl.losses.configs import PpoConfig


def settings(**sections: Any) -> dict[str, Any]:
    return {"model": {"path": "org/model"}, "data": {"train": "rows.jsonl"}, "steps": 3, **sections}


def test_a_run_is_read_again_as_it_was_with_its_plugins_wherever_the_rank_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weights").mkdir()
    monkeypatch.chdir(tmp_path)
    loaded = load_config(
        settings(
            plugins=["collation_fast"],
            model={"path": "weights"},
            run_dir="runs/one",
            loss={"name": "dft"},
            optimizer={"name": "sgd", "learning_rate": 0.5},
        )
    )
    sent = json.loads(json.dumps(plain_run(loaded.config)))
    monkeypatch.chdir("/")
    run, registry = read_run(sent)
    assert run.run_dir == tmp_path / "runs/one"
    assert run.model.path == str(tmp_path / "weights")
    assert run.model_dump(exclude={"run_dir"}) == loaded.config.model_dump(exclude={"run_dir"})
    assert registry.default("collator") == loaded.host.registry.default("collator")


def test_sections_that_a_program_built_without_loading_keep_all_their_settings() -> None:
    loaded = load_config(settings())
    run = loaded.config.model_copy(update={"loss": PpoConfig(clip_high=0.4)})
    read, _ = read_run(plain_run(run))
    assert read.loss.model_dump() == PpoConfig(clip_high=0.4).model_dump()


def test_an_objective_is_made_again_and_gives_equal_values() -> None:
    registry = PluginHost.load([]).registry
    loss = Ppo(PpoConfig(clip_high=0.4, dual_clip=3.0))
    sent = json.loads(json.dumps(plain_objective(Objective(loss, 12.5, 0.7))))
    read = read_objective(sent, registry)
    assert (read.normalizer, read.temperature) == (12.5, 0.7)
    columns = {"advantages": torch.tensor([1.0, -2.0, 0.5]), "old_logprobs": torch.tensor([-1.0, -3.0, -0.1])}
    inputs = TokenLossInputs(torch.tensor([-0.2, -0.9, -2.0]), torch.tensor([0, 0, 1]), 2, columns)
    assert torch.equal(read.loss.token_loss(inputs), loss.token_loss(inputs))


def test_a_loss_under_the_name_that_a_plugin_replaced_is_the_one_that_was_sent() -> None:
    registry = PluginHost.load([]).registry
    sent = plain_objective(Objective(CrossEntropy(CrossEntropyConfig(name="models/cross_entropy")), 1.0))
    assert isinstance(read_objective(sent, registry).loss, CrossEntropy)


class Remembering(CrossEntropy):
    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        pass


def test_a_loss_with_a_state_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"loss is made by Remembering, which keeps a state.*backend.name: local"):
        plain_objective(Objective(Remembering(CrossEntropyConfig()), 1.0))


def test_a_loss_without_its_config_is_refused_with_the_way_out() -> None:
    loss = CrossEntropy(CrossEntropyConfig())
    del loss.config
    with pytest.raises(PluginError, match=r"CrossEntropy has no attribute `config`.*self\.config = config"):
        plain_objective(Objective(loss, 1.0))


def test_a_run_with_a_plugin_that_a_rank_lacks_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match="there_is_none"):
        read_run(plain_run(load_config(settings()).config) | {"plugins": ["there_is_none"]})
