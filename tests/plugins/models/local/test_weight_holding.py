"""Weights in half precision with masters, and an optimizer on the host."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import lay_out, local_backend, make_samples, run_config, write_model_folder
from held_weights import OBJECTIVE, round_files, train, write_fp32_files
from torch import Tensor
from torch.nn import Parameter

from spurline.config.run_config import ModelConfig
from spurline_models.configs import LoraConfig
from spurline_models.device_profile import device_profile
from spurline_models.local.backend import LocalBackend
from spurline_models.local.checkpoint import read_weights
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.optimizers.configs import AdamW8BitConfig, AdamWConfig, MuonConfig
from spurline_models.placement.master_parameters import VALUES_AT_ONCE, MasterParameters, step_buckets

HALF = {"precision": "bf16"}
MASTERS = {**HALF, "weights": "bf16_masters"}
ON_HOST = {"offload_optimizer": True}
MODES = [MASTERS, ON_HOST, {**MASTERS, **ON_HOST}]
BATCH = lay_out(make_samples([9, 12, 20, 3]))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model whose files hold fp32 values that bf16 does not have."""
    return write_fp32_files(tmp_path / "model")


@pytest.fixture
def half_files(files: Path) -> Path:
    return round_files(files)


def opened(folder: Path, freeze: tuple[str, ...] = (), **settings: Any) -> LocalBackend:
    run = settings.pop("run", {})
    model = ModelConfig(path=str(folder), freeze=freeze)
    return local_backend(folder, run={"model": model, **run}, **settings)


def copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


def same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def narrow_names(backend: LocalBackend) -> set[str]:
    return {name for name, value in backend._model.causal.named_parameters() if value.dtype == torch.bfloat16}


def test_masters_learn_what_wide_weights_learn_under_autocast_bit_for_bit(half_files: Path) -> None:
    # But for the embedding, which autocast does not round: it is frozen here. The norm of narrow gradients is summed in
    # another order, so nothing is clipped.
    optimizer = AdamWConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=None)
    settings: dict[str, Any] = {"freeze": ("*embed*",), "rows_per_microbatch": 1, "run": {"optimizer": optimizer}}
    masters, wide = (opened(half_files, **settings, **mode) for mode in (MASTERS, HALF))
    for expected, got in zip(train(wide, range(3)), train(masters, range(3)), strict=True):
        assert got.pop("grad_norm") == pytest.approx(expected.pop("grad_norm"), rel=1e-6)
        assert got == expected
    assert same(masters.trained_parameters(), wide.trained_parameters())
    assert same(dict(masters.gradients(BATCH, OBJECTIVE)), dict(wide.gradients(BATCH, OBJECTIVE)))
    assert torch.equal(masters.logprobs(BATCH), wide.logprobs(BATCH))


def test_masters_begin_with_the_values_of_the_files_and_the_model_with_the_nearest(files: Path) -> None:
    masters, wide = (opened(files, **mode) for mode in (MASTERS, HALF))
    assert same(masters.trained_parameters(), wide.trained_parameters())
    for name, weight in masters._model.causal.named_parameters():
        assert torch.equal(weight, masters.trained_parameters()[name].to(weight.dtype)), name
    assert {"model.embed_tokens.weight", "lm_head.weight"} < narrow_names(masters)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_do_not_depend_on_the_layout_or_the_cutting_beyond_rounding(tmp_path: Path, tied: bool) -> None:
    model = write_model_folder(tmp_path / "model", tie_word_embeddings=tied)
    samples = make_samples([9, 12, 20, 3, 7, 15])
    whole = local_backend(model, **MASTERS, activation_checkpointing=True)
    wanted = dict(whole.gradients(lay_out(samples, [[0, 1, 2, 3, 4, 5]]), OBJECTIVE))
    for settings in ({}, {"rows_per_microbatch": 1}):
        for name, gradient in local_backend(model, **MASTERS, **settings).gradients(lay_out(samples), OBJECTIVE):
            assert gradient.dtype == torch.float32
            difference = torch.linalg.vector_norm(gradient - wanted[name])
            assert difference <= 0.01 * torch.linalg.vector_norm(wanted[name]), name


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        ({}, MuonConfig),
        ({"lora": LoraConfig(rank=2)}, AdamWConfig),
        ({"precision": "fp64"}, AdamWConfig),
        (MASTERS, AdamWConfig),
    ],
)
def test_an_optimizer_on_the_host_learns_the_same_bit_for_bit(
    tmp_path: Path, settings: dict[str, Any], optimizer: Callable[..., AdamWConfig]
) -> None:
    model = write_model_folder(tmp_path / "model")
    run = {"optimizer": optimizer(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5)}
    there, here = (local_backend(model, run=run, **settings, **extra) for extra in (ON_HOST, {}))
    assert train(there, range(3)) == train(here, range(3))
    assert same(dict(there.named_weights()), dict(here.named_weights()))
    assert same(there.trained_parameters(), here.trained_parameters())
    # Not the model's own memory, which is that of a GPU elsewhere.
    own = {value.data_ptr() for value in there._model.causal.parameters()}
    assert not own & {value.data_ptr() for value in there._policy._masters.parameters.values() if value.numel()}


@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [*((mode, AdamWConfig) for mode in MODES), (MASTERS, AdamW8BitConfig), ({**MASTERS, **ON_HOST}, MuonConfig)],
)
def test_a_run_goes_on_bit_for_bit_and_is_exported_from_its_checkpoint(
    files: Path, tmp_path: Path, mode: dict[str, Any], optimizer: Callable[..., AdamWConfig]
) -> None:
    if optimizer is AdamW8BitConfig:
        pytest.importorskip("bitsandbytes")
    run = {"optimizer": optimizer(learning_rate=1e-2, max_grad_norm=0.5)}
    settings: dict[str, Any] = {"freeze": ("*layers.1.mlp*", "*layers.1.*norm*"), "run": run, **mode}
    backend, resumed = (opened(files, **settings) for _ in range(2))
    train(backend, range(2))
    backend.save(tmp_path / "saved")
    weights = copied(dict(backend.named_weights()))
    expected = train(backend, range(2, 4))
    resumed.load(tmp_path / "saved")
    assert same(dict(resumed.named_weights()), weights)
    assert train(resumed, range(2, 4)) == expected
    assert same(resumed.trained_parameters(), backend.trained_parameters())

    config = run_config(files, model=ModelConfig(path=str(files), freeze=settings["freeze"]), backend=backend._config)
    read = dict(read_weights(config, tmp_path / "saved", {}).tensors)
    assert same(read, {name: value.float() for name, value in weights.items()})


def test_a_checkpoint_of_masters_is_that_of_wide_weights(half_files: Path, tmp_path: Path) -> None:
    masters, wide = (opened(half_files, **mode) for mode in (MASTERS, HALF))
    train(masters, range(1))
    masters.save(tmp_path / "saved")
    assert narrow_names(masters) == set(json.loads((tmp_path / "saved/state.json").read_text())["narrow_weights"])
    wide.load(tmp_path / "saved")
    assert same(wide.trained_parameters(), masters.trained_parameters())


def test_the_reference_is_what_the_policy_computed_with_at_first(files: Path) -> None:
    backend = opened(files, **MASTERS)
    before = backend.logprobs(BATCH)
    train(backend, range(2))
    assert torch.equal(backend.logprobs(BATCH, "reference"), before)
    assert not torch.equal(backend.logprobs(BATCH), before)
    assert "reference" in backend._frozen
    held = {name: value.dtype for name, value in backend._frozen["reference"].causal.named_parameters()}
    assert {name for name, dtype in held.items() if dtype == torch.bfloat16} == narrow_names(backend)


def test_training_goes_on_after_the_device_was_given_away(half_files: Path, tmp_path: Path) -> None:
    giving, plain = (opened(half_files, **MASTERS) for _ in range(2))
    for step in range(3):
        assert train(giving, range(step, step + 1)) == train(plain, range(step, step + 1))
        giving.yield_device(keep_weights=False)
        masters = giving._policy._masters.kept()
        assert all(value.untyped_storage().nbytes() == 0 for value in masters if value.untyped_storage().resizable())
        if step == 1:
            giving.save(tmp_path / "saved")
        giving.take_device()
    resumed = opened(half_files, **MASTERS)
    resumed.load(tmp_path / "saved")
    assert train(resumed, range(2, 3))
    assert same(resumed.trained_parameters(), plain.trained_parameters())


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_memory_is_estimated_exactly(half_files: Path, mode: dict[str, Any]) -> None:
    optimizer = AdamWConfig()
    backend = opened(half_files, **mode, run={"optimizer": optimizer})
    train(backend, range(1))
    run = run_config(half_files, model=ModelConfig(path=str(half_files)), optimizer=optimizer)
    parts = LocalBackendConfig(device="cpu", **mode).estimate_memory(run, 100, 100).parts
    assert parts["weights"] == sum(value.nbytes for value in backend._model.causal.parameters())
    assert parts.get("masters", 0) == sum(value.nbytes for value in backend._policy._masters.kept())
    assert parts["gradients"] == sum(value.nbytes for value in backend._policy.parameters.values())
    state = {value.data_ptr(): value for value in backend._policy.tensors().state if value.ndim}
    kept = sum(value.nbytes for value in state.values()) - parts.get("masters", 0)
    assert parts["optimizer"] == pytest.approx(kept, rel=0.01)
    cut = LocalBackendConfig(device="cpu", rows_per_microbatch=1, **mode).estimate_memory(run, 50, 100).parts
    assert cut["gradients"] == sum(4 * value.numel() for value in backend._policy.parameters.values())


def test_a_step_changes_masters_and_gives_the_model_the_nearest_values() -> None:
    wide = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    weight, norm = Parameter(wide.bfloat16()), Parameter(torch.ones(32))
    parameters = {"weight": weight, "norm": norm}
    made = MasterParameters(parameters, device_profile("cpu", "bf16"), {"weight": wide})
    assert made.parameters["norm"] is norm
    optimizer = torch.optim.AdamW(made.parameters.values(), lr=0.1, fused=True)
    before = weight.detach().clone()
    gradients = {name: torch.ones_like(value) for name, value in parameters.items()}
    made.step(optimizer.step, gradients)
    assert not gradients
    assert not torch.equal(before, weight)
    assert all(value.grad is None for value in made.parameters.values())
    assert [value.data_ptr() for value in made.kept()] == [wide.data_ptr()]
    assert torch.equal(weight.detach(), made.values["weight"].bfloat16())


def test_few_parameters_are_stepped_on_at_once_where_the_optimizer_allows_it() -> None:
    sizes = {"a": VALUES_AT_ONCE // 2, "b": VALUES_AT_ONCE // 2, "c": 1, "large": 2 * VALUES_AT_ONCE}
    assert step_buckets(sizes, apart=True) == [["a", "b"], ["c"], ["large"]]
    assert step_buckets(sizes, apart=False) == [list(sizes)]
