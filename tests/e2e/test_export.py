"""A run's weights as a Hugging Face folder, from the run itself and from its checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from spurline import Run, load_config
from spurline.config.loading import LoadedConfig
from spurline.errors import CheckpointError
from spurline.model import saved_weights
from spurline.run import export
from spurline.run.export import export_run
from spurline.testing.inputs import write_tiny_model, write_tiny_moe_model

ADAPTERS = {"rank": 4, "alpha": 16.0}


@pytest.fixture
def reader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test with this fixture fails where an export builds a backend or loads the whole model."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr(export, "build_backend", refuse)
    monkeypatch.setattr(saved_weights, "load_model", refuse)


def trained(config: dict[str, Any], model: Path, **backend: Any) -> LoadedConfig:
    """A finished run of three steps, which has exported its model itself."""
    config |= {"steps": 3, "optimizer": {"learning_rate": 1e-2}}
    config["model"]["path"] = str(model)
    config["backend"] |= backend
    config["checkpoint"]["export_hf"] = True
    loaded = load_config(config)
    Run(loaded).train()
    return loaded


@pytest.mark.usefixtures("reader_alone")
@pytest.mark.parametrize("adapters", [None, ADAPTERS], ids=["whole", "adapters"])
@pytest.mark.parametrize("kind", ["plain", "tied", "experts"])
def test_a_checkpoint_is_exported_without_the_model_as_the_run_exports_it(
    base_config: dict[str, Any], tmp_path: Path, kind: str, adapters: dict[str, Any] | None
) -> None:
    write = write_tiny_moe_model if kind == "experts" else write_tiny_model
    model = write(tmp_path / "model", tie_word_embeddings=kind == "tied")
    loaded = trained(base_config, model, lora=adapters)
    export_run(loaded, tmp_path / "exported")
    assert contents(tmp_path / "exported") == contents(Path(base_config["run_dir"]) / "model")
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "exported"))
    changed = [name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])]
    assert changed


def test_adapters_on_random_weights_are_exported_too(base_config: dict[str, Any], tmp_path: Path) -> None:
    base_config["model"]["init"] = "random"
    loaded = trained(base_config, Path(base_config["model"]["path"]), lora=ADAPTERS)
    export_run(loaded, tmp_path / "exported")
    assert contents(tmp_path / "exported") == contents(Path(base_config["run_dir"]) / "model")


def test_adapters_are_not_merged_with_weights_that_have_changed_since(
    base_config: dict[str, Any], tmp_path: Path
) -> None:
    model = Path(shutil.copytree(base_config["model"]["path"], tmp_path / "model"))
    loaded = trained(base_config, model, lora=ADAPTERS)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    before = set(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match="adapters were trained on other frozen weights"):
        export_run(loaded, tmp_path / "exported")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"weight model\.layers\.1\.mlp\.up_proj\.weight .*its files have none"):
        export_run(loaded, tmp_path / "exported")
    assert set(tmp_path.iterdir()) == before


def test_a_checkpoint_of_another_model_is_refused_with_the_weights_that_differ(
    base_config: dict[str, Any], tmp_path: Path
) -> None:
    trained(base_config, Path(base_config["model"]["path"]))
    base_config["model"]["config_overrides"] = {"num_hidden_layers": 1}
    with pytest.raises(CheckpointError, match=r"not in the model \(model\.layers\.1\."):
        export_run(load_config(base_config), tmp_path / "exported")


@pytest.mark.processes
def test_ranks_answer_prompts_and_export_as_their_checkpoint_is_exported(
    base_config: dict[str, Any], spurline_chat_file: Path, tmp_path: Path
) -> None:
    base_config["plugins"] = ["fsdp_backend"]
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {
        "every_steps": 3,
        "generate": {"rewards": {"exact": "exact_match"}, "max_new_tokens": 4, "max_samples": 5},
    }
    model = Path(base_config["model"]["path"])
    one = trained(base_config | {"run_dir": str(tmp_path / "one")}, model, lora=ADAPTERS)
    ranks = base_config | {"backend": {"name": "fsdp", "device": "cpu", "ranks": 2, "num_threads": 1}}
    many = trained(ranks, model, lora=ADAPTERS)
    answers = [Path(run.config.run_dir) / "eval_samples.jsonl" for run in (one, many)]
    assert answers[0].read_text() == answers[1].read_text()
    export_run(many, tmp_path / "exported")
    assert contents(tmp_path / "exported") == contents(Path(many.config.run_dir) / "model")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
