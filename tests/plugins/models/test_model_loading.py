"""Models and tokenizers load from their files without a second copy, or say what is wrong and what to do."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from backend_batches import local_backend, run_config, write_model_folder
from run_helpers import anonymous_bytes
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from spurline.config.run_config import CriticConfig, ModelConfig
from spurline.errors import ModelError
from spurline_models import weight_files
from spurline_models.architecture import build_without_memory, load_model_config
from spurline_models.device_profile import device_profile
from spurline_models.loading import load_model
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.local.trained_model import WeightPlacement
from spurline_models.memory import estimate_cache
from spurline_models.optimizers.configs import AdamWConfig
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model
from spurline_models.weights import NamedWeights
from spurline_rl.losses.configs import ValueLossConfig
from spurline_rl.training_configs import ByPromptConfig
from spurline_text.testing.inputs import tiny_tokenizer
from spurline_text.tokenizer import load_tokenizer


@pytest.fixture
def architecture(tmp_path: Path) -> Path:
    return write_model_folder(tmp_path / "models" / "tiny-qwen3")


def load(model: Path | str, **settings: Any) -> dict[str, torch.Tensor]:
    run = {"model": ModelConfig(path=str(model), **settings)}
    return dict(local_backend(model, run=run).named_weights())


def test_random_weights_depend_on_the_seed_alone(architecture: Path) -> None:
    def weights(seed: int, **settings: Any) -> torch.Tensor:
        torch.rand(seed + 3)
        backend = local_backend(architecture, run={"seed": seed}, **settings)
        return dict(backend.named_weights())["lm_head.weight"].clone()

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))
    assert torch.equal(weights(1, precision="fp64"), weights(1).double())


def test_pretrained_weights_are_loaded_in_float32_and_leave_under_their_file_names(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    stored.save_pretrained(tmp_path / "half")
    weights = load(tmp_path / "half")
    assert weights.keys() == stored.state_dict().keys()
    for name, tensor in weights.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, stored.state_dict()[name].float()), name


def test_weights_that_are_given_take_the_place_of_those_of_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = write_tiny_moe_model(tmp_path / "model")
    weights = {name: value + 1 for name, value in load_file(folder / "model.safetensors").items()}
    causal = load_model(ModelConfig(path=str(folder)), device_profile("cpu"), 0, weights=weights)
    got = dict(NamedWeights(causal, adapted=False))
    assert got.keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in got.items())
    del weights["lm_head.weight"]
    with pytest.raises(ModelError, match=r"lack 1 weights .*lm_head\.weight"):
        load_model(ModelConfig(path=str(folder)), device_profile("cpu"), 0, weights=weights)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hidden_size": "big"}, r"model\.config_overrides\.hidden_size is 'big'.*expected int.*model itself has 32"),
        ({"use_return_dict": True}, r"model\.config_overrides\.use_return_dict is True, which does not fit"),
        ({"layer_types": "all"}, r"model\.config_overrides\.layer_types is 'all', which does not fit"),
        ({"hidden_act": "nope"}, r"model\.config_overrides: no model can be built with .*nope"),
        ({"to_dict": 1}, r"'to_dict' is not a field of Qwen3Config"),
        ({"HIDDEN_SIZE": 1}, r"'HIDDEN_SIZE' is not a field.*Did you mean 'hidden_size'"),
    ],
)
def test_an_override_that_does_not_fit_is_named(architecture: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        load(architecture, init="random", config_overrides=overrides)


def test_a_missing_folder_gets_the_nearest_one(architecture: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: folder .* does not exist\. Did you mean 'tiny-qwen3'"):
        load(architecture.parent / "tiny-qwen")


def test_a_folder_without_weights_names_init_random(architecture: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)no weights can be loaded from folder.*config\.json.*init: random"):
        load(architecture)


def test_a_hub_name_that_cannot_be_reached_says_what_to_check() -> None:
    with pytest.raises(ModelError, match=r"(?s)nobody/nothing-here is neither a local folder.*hf download"):
        load("nobody/nothing-here")


def test_a_model_that_generates_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a causal language model"):
        load(write_model_folder(tmp_path / "vit", model_type="vit", architectures=None), init="random")


def test_memory_is_estimated_without_loading_and_counts_parameters_exactly(architecture: Path) -> None:
    backend = local_backend(architecture)
    count = sum(tensor.numel() for _, tensor in backend.named_weights())
    run = run_config(architecture)
    parts = LocalBackendConfig().estimate_memory(run, 100, 100).parts
    assert parts["weights"] == parts["gradients"] == 4 * count
    assert parts["optimizer"] == 8 * count
    frugal = LocalBackendConfig(activation_checkpointing=True, logits_chunk_tokens=10)
    less = frugal.estimate_memory(run, 100, 100).parts
    assert less["activations"] < parts["activations"]
    assert less["logits"] == parts["logits"] // 10
    critic = CriticConfig(loss=ValueLossConfig(), minibatches=ByPromptConfig(), optimizer=AdamWConfig())
    both = LocalBackendConfig().estimate_memory(run_config(architecture, critic=critic), 100, 100).parts
    assert both == {**parts, "critic": 12 * count}


def test_memory_of_the_cache_is_that_of_keys_and_values(architecture: Path) -> None:
    # 2 layers, 2 key heads of 8: 64 numbers of keys and values per token.
    model = ModelConfig(path=str(architecture))
    assert estimate_cache(model, 1000, precision="fp32") == 1000 * 64 * 4
    assert estimate_cache(model, 1000, precision="bf16") == 1000 * 64 * 2


def test_a_model_that_also_sees_says_how_its_text_part_is_trained_and_that_way_works(tmp_path: Path) -> None:
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    config = AutoConfig.for_model(
        "mistral3",
        text_config=size | {"model_type": "mistral", "num_key_value_heads": 2, "vocab_size": 300},
        vision_config=size | {"model_type": "pixtral", "image_size": 16, "patch_size": 8},
    )
    seeing, text = tmp_path / "seeing", tmp_path / "text"
    whole = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(seeing)
    tiny_tokenizer().save_pretrained(seeing)
    with pytest.raises(ModelError, match=r"also sees or hears.*text part.*docs/models\.md"):
        load(seeing)
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"## Models that also see or hear\n.*?```python\n(.*?)```", page, re.DOTALL)
    exec(shown, {"SOURCE": str(seeing), "FOLDER": str(text)})
    weights = load(text)
    expected = whole.state_dict()["model.language_model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], expected)
    assert len(load_tokenizer(ModelConfig(path=str(text)))) == len(tiny_tokenizer())


MIB = 1 << 20
WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 4096}


@contextmanager
def growth() -> Iterator[Callable[[], int]]:
    """Gives a function for by how many bytes the anonymous memory of this process has grown at most."""
    # What is imported takes memory too, and what is free would be used again without a trace.
    assert peft.LoraConfig
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak - before
    finally:
        done.set()
        thread.join()


def write_weights(folder: Path, dtype: torch.dtype) -> Path:
    """A model folder whose weights are as large as the shape says, and were never all in memory here."""
    model = ModelConfig(path=str(folder))
    layout = build_without_memory(load_model_config(model), model).state_dict()
    weights = {name: torch.full(value.shape, 0.01, dtype=dtype) for name, value in layout.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("base_dtype", "stored"),
    [pytest.param("auto", torch.bfloat16, id="as they are stored"), pytest.param("bf16", torch.float32, id="rounded")],
)
def test_loading_takes_at_most_a_few_tensors_more_than_what_it_loads(
    tmp_path: Path, base_dtype: str, stored: torch.dtype
) -> None:
    folder = write_weights(write_model_folder(tmp_path / "model", **WIDE), stored)
    run = run_config(folder, model=ModelConfig(path=str(folder)))
    config = LocalBackendConfig.model_validate({"lora": {"rank": 2, "base_dtype": base_dtype}})
    with growth() as grown:
        causal, _ = WeightPlacement(config, run, device_profile("cpu")).load_trainable()
        held = sum(parameter.nbytes for parameter in causal.parameters())
        assert held > 80 * MIB
        # Wide weights would take as much again, and twice as much as long as they are there.
        assert grown() < held + 40 * MIB


def test_a_loaded_model_does_not_depend_on_its_files(tmp_path: Path) -> None:
    folder = write_weights(write_model_folder(tmp_path / "model"), torch.float32)
    (file,) = folder.glob("*.safetensors")
    causal = load_model(ModelConfig(path=str(folder)), device_profile("cpu"), 0)
    with file.open("r+b") as opened:
        opened.seek(-4096, os.SEEK_END)
        opened.write(bytes(4096))
    with safe_open(file, "pt") as rewritten:
        assert any((rewritten.get_tensor(name) == 0).any() for name in rewritten.keys())  # noqa: SIM118
    assert all((value == 0.01).all() for value in causal.parameters())


def test_of_a_repository_only_the_files_that_are_loaded_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        if len(asked) == 1:
            names = {"a": "part-2.safetensors", "b": "part-1.safetensors"}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        else:
            for file in allow_patterns:
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(weight_files, "snapshot_download", download)
    monkeypatch.setattr("spurline_text.hub.hub_answers", lambda: False)
    found = weight_files.safetensors_files(ModelConfig(path="nobody/model"))
    assert [file.name for file in found] == ["part-1.safetensors", "part-2.safetensors"]
    assert asked == [
        ["model.safetensors", "model.safetensors.index.json"],
        ["part-1.safetensors", "part-2.safetensors"],
    ]
