"""What `model.freeze` names keeps its values, costs no gradient and no optimizer state, and is in no checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, run_config, write_model_folder
from safetensors.torch import load_file

from spurline.config.run_config import ModelConfig
from spurline.errors import CheckpointError, ConfigError
from spurline_models.local.backend import LocalBackend
from spurline_models.local.checkpoint import read_weights
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.trainable import check_trainable

OBJECTIVE = cross_entropy(9.0)
LOWER = ("*embed_tokens*", r"re:layers\.0\.", "lm_head.weight")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "model")


def model_of(folder: Path, *freeze: str) -> ModelConfig:
    return ModelConfig(path=str(folder), init="random", freeze=freeze)


def frozen(folder: Path, *freeze: str, **settings: Any) -> LocalBackend:
    return local_backend(folder, run={"model": model_of(folder, *freeze)}, **settings)


def test_what_is_frozen_has_no_gradient_and_the_rest_the_gradient_that_it_has_anyway(folder: Path) -> None:
    backend, whole = frozen(folder, *LOWER, activation_checkpointing=True), frozen(folder)
    before = {name: value.clone() for name, value in backend.named_weights()}
    batch = lay_out(make_samples([9, 12, 5]))
    gradients, expected = (dict(one.gradients(batch, OBJECTIVE)) for one in (backend, whole))
    assert gradients.keys() == {name for name in expected if ".1." in name or name == "model.norm.weight"}
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-8)
    metrics = backend.update(batch, OBJECTIVE)
    norm = torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    changed = {name for name, value in backend.named_weights() if not torch.equal(value, before[name])}
    assert changed == gradients.keys()
    state = backend._policy.optimization.state().tensors
    assert {key.rpartition("/")[0] for key in state} == gradients.keys()


def test_a_checkpoint_holds_what_is_trained_and_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    backend, resumed = frozen(folder, *LOWER), frozen(folder, *LOWER)
    batch = lay_out(make_samples([9, 12]))
    backend.update(batch, OBJECTIVE)
    backend.save(tmp_path / "saved")
    assert load_file(tmp_path / "saved" / "model.safetensors").keys() == backend._policy.parameters.keys()
    run = run_config(folder, model=model_of(folder, *LOWER))
    read = dict(read_weights(run, tmp_path / "saved", {}).tensors)
    assert read.keys() == dict(backend.named_weights()).keys()
    assert all(torch.equal(read[name], value) for name, value in backend.named_weights())
    backend.update(batch, OBJECTIVE)
    resumed.load(tmp_path / "saved")
    resumed.update(batch, OBJECTIVE)
    for (_, one), (_, other) in zip(backend.named_weights(), resumed.named_weights(), strict=True):
        assert torch.equal(one, other)
    seeded = local_backend(folder, run={"model": model_of(folder, *LOWER), "seed": 5})
    with pytest.raises(CheckpointError, match="other frozen weights"):
        seeded.load(tmp_path / "saved")


def test_memory_of_frozen_parts_is_that_of_their_weights_alone(folder: Path) -> None:
    backend = frozen(folder, *LOWER)
    run = run_config(folder, model=model_of(folder, *LOWER))
    parts = LocalBackendConfig().estimate_memory(run, 100, 100).parts
    trained = sum(value.nbytes for value in backend._policy.parameters.values())
    assert parts["weights"] == sum(value.nbytes for _, value in backend.named_weights())
    assert (parts["gradients"], parts["optimizer"]) == (trained, 2 * trained)


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (("*norm*", "*embed_token"), r"model\.freeze\.1 is '\*embed_token', and no parameter.*'\*embed_token\*'"),
        (("model.layers.9.*",), r"model\.freeze\.0 .*no parameter has such a name.*There are 25"),
        (("*",), r"model\.freeze leaves nothing to train"),
    ],
)
def test_a_pattern_that_freezes_nothing_or_everything_is_refused(
    folder: Path, freeze: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        frozen(folder, *freeze)
    with pytest.raises(ConfigError, match=message):
        check_trainable(run_config(folder, model=model_of(folder, *freeze)))
