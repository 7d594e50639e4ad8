"""Frozen weights in half precision: half the memory, and not another bit in what is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import held_weights
import pytest
import torch
from backend_batches import lay_out, local_backend, make_samples, run_config
from held_weights import OBJECTIVE, round_files, train, write_fp32_files
from model_families import FAMILIES, tiny_model
from torch import nn

from spurline.config.run_config import CriticConfig, ModelConfig
from spurline.errors import CheckpointError, ModelError
from spurline.protocols.loss import Objective
from spurline.update.configs import WholeBatchConfig
from spurline_models.configs import LoraConfig
from spurline_models.local.backend import LocalBackend
from spurline_models.local.checkpoint import read_weights
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.optimizers.configs import AdamWConfig
from spurline_models.placement.narrow_weights import narrow_weights, narrowable_modules, widen_where_read
from spurline_planning.fit import with_changes
from spurline_rl.losses.configs import ValueLossConfig
from spurline_rl.losses.value import ValueLoss


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model whose files hold fp32."""
    return write_fp32_files(tmp_path / "model")


@pytest.fixture
def half_files(files: Path) -> Path:
    return round_files(files)


@pytest.fixture
def adapted() -> Callable[..., LocalBackend]:
    return held_weights.adapted


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_weights_held_as_their_files_hold_them_are_trained_over_as_wide_ones_bit_for_bit(
    half_files: Path, tmp_path: Path, adapted: Callable[..., LocalBackend], precision: str, dora: bool
) -> None:
    backends = [adapted(half_files, dtype, dora=dora, precision=precision) for dtype in ("auto", "fp32")]
    narrow, wide = backends
    assert train(narrow, range(2)) == train(wide, range(2))
    narrow.save(tmp_path / "saved")
    wide.load(tmp_path / "saved")
    assert train(narrow, range(2, 4)) == train(wide, range(2, 4)), "a run goes on with either"
    batch = lay_out(make_samples([9, 12, 20, 3]))
    gradients = [dict(backend.gradients(batch, OBJECTIVE)) for backend in backends]
    weights = [dict(backend.named_weights()) for backend in backends]
    for got, expected in (gradients, weights):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name].to(value), value) for name, value in expected.items())
    frozen = {
        name: value.dtype for name, value in narrow._model.causal.named_parameters() if name.endswith("layer.weight")
    }
    assert set(frozen.values()) == {torch.bfloat16}


def test_gradients_over_narrow_weights_do_not_depend_on_the_layout(
    half_files: Path, adapted: Callable[..., LocalBackend]
) -> None:
    backend = adapted(half_files, probe=True, activation_checkpointing=True)
    train(backend, range(1))
    samples = make_samples([9, 12, 20, 3])
    packed = dict(backend.gradients(lay_out(samples, [[0, 1, 2, 3]]), OBJECTIVE))
    for name, gradient in backend.gradients(lay_out(samples, length=32), OBJECTIVE):
        assert torch.linalg.vector_norm(gradient - packed[name]) <= 3e-6 * torch.linalg.vector_norm(packed[name]), name


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_a_run_over_rounded_weights_goes_on_bit_for_bit_and_is_exported_from_its_checkpoint(
    files: Path, tmp_path: Path, adapted: Callable[..., LocalBackend], dora: bool
) -> None:
    backend, resumed = (adapted(files, "bf16", dora=dora) for _ in range(2))
    initial = backend.logprobs(lay_out(make_samples([9, 12])), role="reference")
    torch.testing.assert_close(backend.logprobs(lay_out(make_samples([9, 12]))), initial, atol=1e-5, rtol=0)
    train(backend, range(2))
    backend.save(tmp_path / "saved")
    run = run_config(files, model=ModelConfig(path=str(files)), backend=backend._config)
    read = dict(read_weights(run, tmp_path / "saved", {}).tensors)
    weights = dict(backend.named_weights())
    assert read.keys() == weights.keys()
    assert all(torch.equal(value, weights[name].float()) for name, value in read.items())
    expected = train(backend, range(2, 4))
    resumed.load(tmp_path / "saved")
    assert train(resumed, range(2, 4)) == expected
    with pytest.raises(CheckpointError, match=r"other frozen weights.*base_dtype"):
        adapted(files, dora=dora).load(tmp_path / "saved")


@pytest.mark.parametrize("settings", [{}, {"precision": "bf16"}, {"precision": "fp64"}], ids=str)
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_memory_of_narrow_weights_is_estimated_exactly(
    half_files: Path, adapted: Callable[..., LocalBackend], dora: bool, settings: dict[str, Any]
) -> None:
    backend = adapted(half_files, dora=dora, **settings)
    held = sum(value.nbytes for value in backend._model.causal.parameters())
    run = run_config(half_files, model=ModelConfig(path=str(half_files)))
    config = LocalBackendConfig(lora=backend._config.lora, **settings)
    parts = config.estimate_memory(run, 100, 100)
    assert parts["weights"] == held
    assert parts["gradients"] == sum(value.nbytes for value in backend._policy.parameters.values())


def test_a_plan_suggests_to_hold_weights_under_adapters_in_half_precision() -> None:
    config = LocalBackendConfig(lora=LoraConfig(rank=4), activation_checkpointing=True)
    change = next(iter(config.savings(run_config("m"), 10, 10)))
    assert change == {"lora.base_dtype": "bf16"}
    assert with_changes(config, change).lora == LoraConfig(rank=4, base_dtype="bf16")
    assert not list(LocalBackendConfig(device="cpu", activation_checkpointing=True).savings(run_config("m"), 10, 10))


@pytest.mark.parametrize("probe", [True, False])
def test_weights_that_a_model_reads_in_its_own_way_are_held_wide(tmp_path: Path, probe: bool) -> None:
    family = next(family for family in FAMILIES if family.model_type == "mamba")
    tiny_model(family).bfloat16().save_pretrained(tmp_path)
    loras = [
        LoraConfig.model_validate({"target_modules": ["in_proj"], "base_dtype": each}) for each in ("auto", "fp32")
    ]
    run = {"model": ModelConfig(path=str(tmp_path))}
    found, expected = (train(local_backend(tmp_path, lora=lora, run=run, probe=probe), range(2)) for lora in loras)
    assert found == expected


def test_a_critic_holds_wide_what_the_policy_does(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.model_type == "mamba")
    tiny_model(family).bfloat16().save_pretrained(tmp_path)
    critic = CriticConfig(loss=ValueLossConfig(clip=None), minibatches=WholeBatchConfig(), optimizer=AdamWConfig())
    batch = lay_out(make_samples([9, 5]))
    batch = batch.with_tokens(**dict.fromkeys(("values", "returns"), torch.ones(batch.num_rows, batch.length)))
    norms = [
        local_backend(
            tmp_path,
            lora=LoraConfig(target_modules=("in_proj",), base_dtype=dtype),
            run={"model": ModelConfig(path=str(tmp_path)), "critic": critic},
        ).update(batch, Objective(ValueLoss(ValueLossConfig(clip=None)), 9.0), role="critic")["grad_norm"]
        for dtype in ("auto", "fp32")
    ]
    assert norms[0] == norms[1]


def test_trained_weights_that_a_model_reads_in_its_own_way_are_refused_with_the_fix(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.model_type == "mamba")
    tiny_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"Set backend\.weights: fp32"):
        local_backend(
            tmp_path, run={"model": ModelConfig(path=str(tmp_path))}, precision="bf16", weights="bf16_masters"
        )


def test_a_weight_whose_dtype_a_model_asks_for_is_held_wide_alone() -> None:
    model: Any = nn.ModuleDict({"up": nn.Linear(4, 4), "head": nn.Linear(4, 7)}).requires_grad_(False)
    narrow_weights(model, torch.bfloat16, torch.float32)

    def run() -> None:
        assert model["head"](model["up"](torch.ones(2, 4)).to(model["head"].weight.dtype)).dtype == torch.float32

    widen_where_read(model, run)
    assert [layer.weight.dtype for layer in model.values()] == [torch.bfloat16, torch.float32]


class _ScaledEmbedding(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * torch.tensor(3.3, dtype=self.weight.dtype)


def test_a_weight_that_some_module_reads_in_its_own_way_stays_wide() -> None:
    model = nn.ModuleDict({"embed": _ScaledEmbedding(7, 4), "head": nn.Linear(4, 7, bias=False), "up": nn.Linear(4, 4)})
    assert [name for name, _ in narrowable_modules(model)] == ["head", "up"]
    model["head"].weight = model["embed"].weight
    assert [name for name, _ in narrowable_modules(model)] == ["up"]


def test_a_model_that_rounds_to_the_dtype_of_its_weights_is_not_rounded_in_silence() -> None:
    model: Any = nn.ModuleDict({"head": nn.Linear(4, 7)}).requires_grad_(False)
    narrow_weights(model, torch.bfloat16, torch.float32)
    assert model["head"](torch.ones(2, 4)).dtype == torch.float32
    with pytest.raises(ModelError, match=r"rounds what it computes.*base_dtype: fp32"):
        model["head"](torch.ones(2, 4, dtype=torch.bfloat16))
