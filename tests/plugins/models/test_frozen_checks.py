"""Models of `model.frozen` are checked before any weights are loaded, and count in estimates of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from backend_batches import run_config

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.local.memory import estimate_memory
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.testing.inputs import write_tiny_model
from spurline_models.trainable import check_trainable
from spurline_preference.configs import DpoConfig


def with_frozen(path: Path, /, **frozen: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate({"path": str(path), "frozen": frozen})


def swap_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(content), encoding="utf-8")


def cut_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}), encoding="utf-8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (swap_tokens, r"^model\.frozen\.teacher\.path: the tokenizer of .*2 differ\. The first is .*is 0 for the tr"),
        (cut_weights, r"^model\.frozen\.teacher\.path: \d weights of .*teacher have other shapes"),
        (lambda folder: (folder / "config.json").unlink(), r"^model\.frozen\.teacher\.path: no model can be loaded"),
    ],
)
def test_a_frozen_model_that_does_not_fit_is_refused_before_its_weights_are_loaded(
    tmp_path: Path, damage: Any, message: str
) -> None:
    policy, teacher = write_tiny_model(tmp_path / "policy"), write_tiny_model(tmp_path / "teacher", hidden_size=48)
    run = run_config(policy, model=with_frozen(policy, teacher={"path": str(teacher)}))
    check_trainable(run)
    damage(teacher)
    with pytest.raises(ModelError, match=message):
        check_trainable(run)
    # A folder without a tokenizer says nothing about tokens.
    for file in teacher.glob("*token*"):
        file.unlink()
    if damage is swap_tokens:
        check_trainable(run)


def test_memory_counts_every_untrained_model_that_has_weights_of_its_own(tmp_path: Path) -> None:
    policy, large = write_tiny_model(tmp_path / "policy"), write_tiny_model(tmp_path / "large", hidden_size=64)

    def kept(model: ModelConfig, **settings: Any) -> dict[str, int]:
        config = LocalBackendConfig(device="cpu", precision="fp32", **settings)
        run = run_config(policy, model=model, loss=DpoConfig(), backend=config)
        return dict(estimate_memory(config, run, 8, 8).kept)

    default, given = with_frozen(policy), with_frozen(policy, reference={"path": str(large)})
    assert kept(default)["reference"] == kept(default)["weights"] < kept(given)["reference"]
    assert "reference" not in kept(default, lora={"rank": 2})
    assert kept(given, lora={"rank": 2})["reference"] == kept(given)["reference"]
    with pytest.raises(ModelError, match=r"^model\.frozen\.reference\.path: folder .*gone does not exist"):
        kept(with_frozen(policy, reference={"path": str(tmp_path / "gone")}))


class TaughtConfig(CrossEntropyConfig):
    """A loss that needs a teacher."""

    name: str = "taught"

    @property
    def roles(self) -> frozenset[str]:
        return frozenset({"teacher", "reference"})


def test_a_role_without_a_model_is_an_error_that_shows_what_to_add(tmp_path: Path) -> None:
    def problems(**frozen: Any) -> list[str]:
        run = run_config(tmp_path, model=with_frozen(tmp_path, **frozen), loss=TaughtConfig())
        return [f"{problem.key} {problem.message}" for problem in run.model.problems(run)]

    assert problems(teacher={"path": "x"}) == []
    [problem] = problems(teachr={"path": "x"})
    assert problem.startswith(
        "frozen has no model with the role 'teacher', which this run uses. Did you mean 'teachr'?"
    )
    assert problem.endswith("model:\n  frozen:\n    teacher:\n      path: FOLDER_OR_HUB_NAME")
    [problem] = problems(teacher={"path": "x"}, policy={"path": "x"})
    assert problem.startswith("frozen.policy has a name with another meaning.")
