"""Files -> the parameters of every rank -> the very tensors that transformers loads; and what is wrong with files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from megatron_models import FAMILIES, grids, joined, ranks_of, tiny_config, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline_megatron_backend.architecture import Architecture, read_architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.loading import load_weights
from spurline_models.architecture import load_model_config
from spurline_models.device_profile import device_profile
from spurline_models.loading import load_model

pytestmark = pytest.mark.usefixtures("group")


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """A group of this process alone: every rank of a grid is simulated in turn."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def architecture_of(folder: Path, **settings: Any) -> tuple[ModelConfig, Architecture]:
    model = ModelConfig(path=str(folder), **settings)
    return model, read_architecture(load_model_config(model))


def loaded(folder: Path, grid: Grid, *, critic: bool = False, **settings: Any) -> dict[str, Tensor]:
    """What the parameters of all ranks of this grid make up after loading."""
    model, architecture = architecture_of(folder, **settings)
    ranks = ranks_of(architecture, grid, critic=critic)
    for held in ranks:
        load_weights(held, model, architecture, 3, "cpu", critic=critic)
    for parameter, values in (pair for held in ranks for pair in held):
        assert not values.isnan().any()
        assert not values.view(-1)[parameter.parts[-1].end if parameter.parts else 0 :].any()
    return joined(ranks)


def as_transformers_loads(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change what a folder of one file holds."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_hold_what_transformers_loads_on_any_grid(family: str, tied: bool, tmp_path: Path) -> None:
    # Several files, so that the tensors of a layer are spread over them.
    write_model(tmp_path, tiny_config(family, tie_word_embeddings=tied), max_shard_size="4KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    _, architecture = architecture_of(tmp_path)
    expected = as_transformers_loads(tmp_path)

    @settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(grids(architecture))
    def check(grid: Grid) -> None:
        assert_equal(loaded(tmp_path, grid), expected)

    check()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("grid", [Grid(1), Grid(6, 2, 3), Grid(8, 2, 2, expert=2)], ids=str)
def test_random_weights_are_those_of_the_local_backend(family: str, grid: Grid, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    model = ModelConfig(path=str(tmp_path), init="random")
    expected = dict(load_model(model, device_profile("cpu"), 3).named_parameters())
    assert_equal(loaded(tmp_path, grid, init="random"), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_are_cast_to_the_dtype_of_the_parameters(dtype: torch.dtype, tmp_path: Path) -> None:
    causal = write_model(tmp_path, tiny_config("qwen3"))
    model, architecture = architecture_of(tmp_path)
    ranks = ranks_of(architecture, Grid(2, 2), dtype=dtype)
    for held in ranks:
        load_weights(held, model, architecture, 0, "cpu")
    assert_equal(joined(ranks), {name: value.to(dtype) for name, value in causal.named_parameters()})
    rewrite(tmp_path, lambda tensors: {name: tensor.to(dtype) for name, tensor in tensors.items()})
    assert_equal(
        loaded(tmp_path, Grid(2, 2)), {name: value.to(dtype).float() for name, value in causal.named_parameters()}
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_files_of_the_model_without_its_output_layer_are_read(family: str, tmp_path: Path) -> None:
    causal = write_model(tmp_path, tiny_config(family, tie_word_embeddings=True))
    rewrite(tmp_path, lambda tensors: {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    assert_equal(as_transformers_loads(tmp_path), dict(causal.named_parameters()))
    assert_equal(loaded(tmp_path, Grid(2, 2)), dict(causal.named_parameters()))


def test_files_may_hold_the_experts_of_a_layer_as_one_tensor(tmp_path: Path) -> None:
    causal = write_model(tmp_path, tiny_config("qwen3_moe"))
    in_files = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in in_files
    fused = {name: value.detach().clone() for name, value in causal.state_dict().items()}

    def half_fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        single = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts" not in name}
        return single | {name: tensor for name, tensor in fused.items() if "layers.1.mlp.experts" in name}

    for change in (lambda _: fused, lambda _: half_fused(in_files)):
        rewrite(tmp_path, change)
        assert_equal(as_transformers_loads(tmp_path), dict(causal.named_parameters()))
        assert_equal(loaded(tmp_path, Grid(4, 2, expert=2, expert_tensor=2)), dict(causal.named_parameters()))


def test_a_tied_embedding_is_read_under_either_of_its_names(tmp_path: Path) -> None:
    causal = write_model(tmp_path, tiny_config("qwen2", tie_word_embeddings=True))
    embedding = "model.embed_tokens.weight"
    for names in ([embedding], ["lm_head.weight"], [embedding, "lm_head.weight"]):

        def change(tensors: dict[str, Tensor], names: list[str] = names) -> dict[str, Tensor]:
            others = {name: tensor for name, tensor in tensors.items() if name not in (embedding, "lm_head.weight")}
            return others | {name: causal.get_input_embeddings().weight.detach().clone() for name in names}

        rewrite(tmp_path, change)
        assert_equal(as_transformers_loads(tmp_path), dict(causal.named_parameters()))
        assert_equal(loaded(tmp_path, Grid(4, 2, 2)), dict(causal.named_parameters()))


def test_a_tied_model_whose_files_have_another_output_layer_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, tiny_config("qwen2", tie_word_embeddings=True))

    def with_own_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += 1
        return tensors | {"lm_head.weight": head}

    rewrite(tmp_path, with_own_head)
    assert "lm_head.weight" in as_transformers_loads(tmp_path)
    message = r"ties the output layer.*differ.*config_overrides: \{tie_word_embeddings: false\}"
    with pytest.raises(ModelError, match=message):
        loaded(tmp_path, Grid(1))
    found = loaded(tmp_path, Grid(2, 2), config_overrides={"tie_word_embeddings": False})
    assert_equal(found, as_transformers_loads(tmp_path))
    # A critic has no output layer.
    assert "model.embed_tokens.weight" in loaded(tmp_path, Grid(1), critic=True)


@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_value_head_begins_with_zeros_whatever_the_files_hold(tied: bool, init: str, tmp_path: Path) -> None:
    write_model(tmp_path, tiny_config("llama", tie_word_embeddings=tied))
    model = ModelConfig(path=str(tmp_path), init=init)
    expected = dict(load_model(model, device_profile("cpu"), 3).named_parameters())
    expected["lm_head.weight"] = torch.zeros(1, 16)
    assert_equal(loaded(tmp_path, Grid(4, 2, 2), critic=True, init=init), expected)
    if init == "pretrained" and not tied:
        rewrite(tmp_path, lambda tensors: {n: t for n, t in tensors.items() if n != "lm_head.weight"})
        assert_equal(loaded(tmp_path, Grid(4, 2, 2), critic=True), expected)


def test_each_rank_reads_no_more_than_its_own_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spurline_megatron_backend import loading

    write_model(tmp_path, tiny_config("qwen3_moe"))
    model, architecture = architecture_of(tmp_path)
    (held, *_) = ranks_of(architecture, Grid(8, 2, 2, expert=2, expert_tensor=2))
    read: list[int] = []
    original = loading.WeightFiles._read

    def counted(self: loading.WeightFiles, *arguments: Any) -> Tensor:
        values = original(self, *arguments)
        read.append(values.numel())
        return values

    monkeypatch.setattr(loading.WeightFiles, "_read", counted)
    load_weights(held, model, architecture, 0, "cpu")
    assert sum(read) == sum(part.box.num_values for parameter, _ in held for part in parameter.parts)
    assert max(read) == max(part.box.num_values for parameter, _ in held for part in parameter.parts)


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def reshaped(name: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: tensors | {name: torch.zeros(shape)}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", without("model.norm.weight"), r"lack 1 weights.*: model\.norm\.weight\. Do config\.json"),
        ("qwen2", without("model.layers.2.self_attn.k_proj.bias"), r"lack 1 .*layers\.2\.self_attn\.k_proj\.bias"),
        ("llama", without("lm_head.weight"), r"lack 1 .*lm_head\.weight"),
        ("qwen3", reshaped("model.layers.1.mlp.up_proj.weight", 16, 24), r"up_proj\.weight is \(16, 24\).*\(24, 16\)"),
        (
            "qwen3_moe",
            without("model.layers.1.mlp.experts.2.down_proj.weight"),
            r"lack 1 .*layers\.1\.mlp\.experts\.2\.down_proj\.weight",
        ),
        (
            "qwen3_moe",
            reshaped("model.layers.0.mlp.experts.0.up_proj.weight", 11, 16),
            r"experts\.0\.up_proj\.weight is \(11, 16\).*\(12, 16\)",
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_by_every_rank(
    family: str, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path, tiny_config(family))
    rewrite(tmp_path, change)
    model, architecture = architecture_of(tmp_path)
    for held in ranks_of(architecture, Grid(4, 2, 2)):
        with pytest.raises(ModelError, match=message):
            load_weights(held, model, architecture, 0, "cpu")
        assert all(values.isnan().all() for _, values in held)


def test_weights_without_a_place_are_named_once_and_old_tables_not_at_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    causal = write_model(tmp_path, tiny_config("llama"))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(1), "model.extra.weight": torch.ones(2)}
    rewrite(tmp_path, lambda tensors: tensors | extra)
    assert_equal(loaded(tmp_path, Grid(1)), dict(causal.named_parameters()))
    (warning,) = caplog.messages
    assert "1 weights" in warning
    assert "model.extra.weight" in warning
