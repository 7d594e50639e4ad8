"""Each built-in optimizer against torch's own or arithmetic done by hand, and what the config says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, run_config, write_model_folder
from torch.nn import Parameter

from spurline import load_config
from spurline.errors import ConfigError
from spurline_models.configs import LoraConfig
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.memory import model_shapes
from spurline_models.optimizers.configs import AdamW8BitConfig, AdamWConfig, MuonConfig, SgdConfig
from spurline_models.optimizers.torch_optimizers import Muon, make_adamw, make_sgd

BASE: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, "steps": 1}
SHAPES = {"embed_tokens.weight": (50, 8), "up_proj.weight": (24, 8), "down_proj.weight": (8, 24), "norm.weight": (8,)}


def parameters() -> dict[str, Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def gradients(steps: int) -> Iterator[Mapping[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def train(optimizers: list[torch.optim.Optimizer], trained: Mapping[str, Parameter], steps: int = 5) -> None:
    for drawn in gradients(steps):
        for name, parameter in trained.items():
            parameter.grad = drawn[name].clone()
        for optimizer in optimizers:
            optimizer.step()


def assert_equal(got: Mapping[str, Parameter], expected: Mapping[str, Parameter]) -> None:
    for name, parameter in expected.items():
        assert torch.equal(got[name], parameter), name


def test_adamw_is_torchs_fused_one_with_decay_on_matrices_alone() -> None:
    ours, theirs = parameters(), parameters()
    train([make_adamw(AdamWConfig(learning_rate=1e-2, weight_decay=0.1), ours)], ours)
    groups = [
        {"params": [value for value in theirs.values() if value.ndim >= 2], "weight_decay": 0.1},
        {"params": [theirs["norm.weight"]], "weight_decay": 0.0},
    ]
    train([torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)], theirs)
    assert_equal(ours, theirs)


def test_sgd_is_its_formula() -> None:
    ours, theirs = parameters(), parameters()
    config = SgdConfig(learning_rate=1e-2, momentum=0.9, weight_decay=0.1)
    train([make_sgd(config, ours)], ours)
    buffers: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for drawn in gradients(5):
            for name, parameter in theirs.items():
                gradient = drawn[name] + (0.1 * parameter if parameter.ndim == 2 else 0)
                buffers[name] = 0.9 * buffers[name] + gradient if name in buffers else gradient
                parameter -= 1e-2 * buffers[name]
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_is_torchs_on_hidden_matrices_and_adamw_on_the_rest(adjust: Any) -> None:
    ours, theirs = parameters(), parameters()
    config = MuonConfig(learning_rate=1e-2, weight_decay=0.1, adjust_learning_rate=adjust)
    train([Muon(config, ours)], ours)
    hidden = [theirs["up_proj.weight"], theirs["down_proj.weight"]]
    rest = [
        {"params": [theirs["embed_tokens.weight"]], "weight_decay": 0.1},
        {"params": [theirs["norm.weight"]], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, momentum=0.95, nesterov=True, adjust_lr_fn=adjust)
    adamw = torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    train([muon, adamw], theirs)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("config", [AdamWConfig(), SgdConfig(), SgdConfig(momentum=0.9), MuonConfig()])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_memory_of_the_optimizer_is_estimated_exactly(tmp_path: Any, config: Any, lora: LoraConfig | None) -> None:
    model = write_model_folder(tmp_path / "model")
    backend = local_backend(model, run={"optimizer": config}, lora=lora)
    backend.update(lay_out(make_samples([9, 12])), cross_entropy(9.0))
    kept = sum(value.nbytes for value in backend._policy.optimization.state().tensors.values() if value.ndim)
    estimate = LocalBackendConfig(lora=lora).estimate_memory(run_config(model, optimizer=config), 100, 100).parts
    assert estimate["optimizer"] == kept
    shapes = model_shapes(run_config(model).model, lora).trained
    assert shapes == {name: tuple(value.shape) for name, value in backend._policy.parameters.items()}


def test_8_bit_moments_name_the_extra_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spurline_models.optimizers.configs.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"optimizer\.name is adamw_8bit, .*pip install spurline-models\[optim-8bit\]"
    ):
        load_config({**BASE, "optimizer": "adamw_8bit"})


def test_a_plan_refuses_8_bit_moments_of_double_precision() -> None:
    run = run_config("m", backend=LocalBackendConfig(precision="fp64"))
    found = [problem for problem in AdamW8BitConfig().problems(run) if "no kernel for float64" in problem.message]
    assert [problem.key for problem in found] == ["name"]
