"""Parameter groups by pattern."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, run_config, write_model_folder

from spurline import load_config
from spurline.errors import ConfigError, PluginError
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.optimizers.configs import AdamWConfig, LinearConfig
from spurline_models.optimizers.groups import parameter_groups
from spurline_models.optimizers.optimization import Optimization

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}
OBJECTIVE = cross_entropy(9.0)


def grouped(*groups: dict[str, Any], **settings: Any) -> AdamWConfig:
    return AdamWConfig.model_validate({"learning_rate": 1e-2, "groups": list(groups), **settings})


@pytest.fixture
def model(tmp_path: Any) -> Any:
    return write_model_folder(tmp_path / "model")


def test_globs_and_regular_expressions_choose_parameters_and_the_first_that_fits_counts(model: Any) -> None:
    config = grouped(
        {"match": "lm_head.weight", "learning_rate": 1e-4},
        {"match": r"re:layers\.[01]\..*proj", "learning_rate_scale": 0.1, "weight_decay": 0.0},
        {"match": "*weight", "weight_decay": 0.3},
        weight_decay=0.1,
    )
    parameters = local_backend(model)._policy.parameters
    found = {
        name: (group["lr"], group["weight_decay"])
        for group in parameter_groups(config, parameters)
        for name, parameter in parameters.items()
        if any(parameter is member for member in group["params"])
    }
    assert found.keys() == parameters.keys()
    assert found["lm_head.weight"] == (1e-4, 0.1)
    assert found["model.layers.1.mlp.up_proj.weight"] == (1e-3, 0.0)
    assert found["model.norm.weight"] == (1e-2, 0.3)


def test_a_step_reports_and_uses_the_rate_of_each_group(model: Any) -> None:
    run = {
        "optimizer": grouped(
            {"match": "*norm*", "learning_rate": 0.0}, {"match": "lm_head*", "learning_rate_scale": 2}
        ),
        "schedule": LinearConfig(warmup_steps=2),
    }
    backend = local_backend(model, run=run)
    before = {name: tensor.clone() for name, tensor in backend.named_weights()}
    metrics = [backend.update(lay_out(make_samples([9, 12])), OBJECTIVE) for _ in range(2)]
    assert [line["lr"] for line in metrics] == pytest.approx([5e-3, 1e-2])
    assert [line["lr/groups.0"] for line in metrics] == [0.0, 0.0]
    assert [line["lr/groups.1"] for line in metrics] == pytest.approx([1e-2, 2e-2])
    kept = {name for name, tensor in backend.named_weights() if (tensor == before[name]).all()}
    assert kept == {name for name in before if "norm" in name}


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [{"match": "*lm_haed*", "learning_rate": 1.0}],
            r"optimizer\.groups\.0\.match is '\*lm_haed\*', and no trained .*Did you mean 'lm_head.*such as ",
        ),
        ([{"match": "lm_head", "learning_rate": 1.0}], r"fit the whole name. Did you mean '\*lm_head\*'"),
        ([{"match": "*", "weight_decay": 1}, {"match": "*norm*", "weight_decay": 0}], r"groups\.1\.match .*earlier"),
    ],
)
def test_a_pattern_that_chooses_nothing_is_an_error_with_near_names(model: Any, groups: Any, message: str) -> None:
    run = {"optimizer": grouped(*groups)}
    with pytest.raises(ConfigError, match=message):
        local_backend(model, run=run)
    # `spurline plan` loads no weights, and finds it too.
    with pytest.raises(ConfigError, match=message):
        LocalBackendConfig().estimate_memory(run_config(model, **run), 100, 100)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"match": "*"}, r"optimizer\.groups\.0 changes nothing\. Give it learning_rate"),
        (
            {"match": "*", "learning_rate": 1, "learning_rate_scale": 2},
            r"groups\.0\.learning_rate and learning_rate_scale",
        ),
        ({"match": "re:(", "weight_decay": 1}, r"groups\.0\.match is 're:\('.* is not a regular expression"),
        ({"match": "*", "lr": 1}, r"groups\.0\.lr is not a setting.*learning_rate"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_before_anything_is_loaded(group: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config({**BASE, "optimizer": {"groups": [group]}})


def test_an_optimizer_that_leaves_parameters_out_is_refused(model: Any) -> None:
    parameters = local_backend(model)._policy.parameters
    config = grouped()
    fewer = parameter_groups(config, {name: value for name, value in parameters.items() if "lm_head" not in name})
    with pytest.raises(PluginError, match="Left out: lm_head"):
        Optimization(config, torch.optim.SGD(fewer, lr=1e-2), parameters, lambda step: 1.0)
