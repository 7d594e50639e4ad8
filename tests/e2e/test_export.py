"""Exports to Hugging Face folders, by the run itself and from its checkpoints."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from run_helpers import Config, assert_problem, on_ranks, train
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from spurline import load_config
from spurline.cli import app
from spurline.config.loading import LoadedConfig
from spurline.config.run_config import ModelConfig
from spurline.errors import CheckpointError, ConfigError, RunFailedError, UserError
from spurline.progress import silent
from spurline_models import export, saved_weights
from spurline_models.adapters.adapter_weights import write_adapter_files
from spurline_models.answering.answers import open_model, open_run
from spurline_models.export import export_run
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.testing.inputs import write_tiny_model, write_tiny_moe_model

ADAPTERS = {"rank": 4, "alpha": 16.0}
NF4 = ADAPTERS | {"base_dtype": "nf4"}


@pytest.fixture
def reader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if an export builds a backend or loads the whole model."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the model was built")

    monkeypatch.setattr(export, "build_backend", refuse)
    monkeypatch.setattr(saved_weights, "load_model", refuse)


def trained(config: Config, model: Path | str | None = None, **backend: Any) -> LoadedConfig:
    """A finished run of three steps, which has exported its model itself."""
    config |= {"steps": 3, "optimizer": {"learning_rate": 1e-2}}
    config["model"]["path"] = str(model or config["model"]["path"])
    config["backend"] |= backend
    config["checkpoint"]["export_hf"] = True
    loaded = load_config(config)
    result = train(loaded)
    folder, with_adapter = result.run_dir, config["checkpoint"].get("export_adapter")
    assert (result.model, result.adapter) == (folder / "model", folder / "adapter" if with_adapter else None)
    return loaded


@pytest.mark.usefixtures("reader_alone")
@pytest.mark.parametrize(
    ("kind", "adapters"),
    [*product(["plain", "tied", "experts"], [None, ADAPTERS]), ("plain", NF4)],
    ids=[*map("-".join, product(["plain", "tied", "experts"], ["whole", "adapters"])), "plain-nf4"],
)
def test_a_checkpoint_is_exported_without_the_model_as_the_run_exports_it(
    base_config: Config, tmp_path: Path, kind: str, adapters: dict[str, Any] | None
) -> None:
    write = write_tiny_moe_model if kind == "experts" else write_tiny_model
    model = write(tmp_path / "model", tie_word_embeddings=kind == "tied")
    loaded = trained(base_config, model, lora=adapters)
    export_run(loaded, tmp_path / "exported")
    assert contents(tmp_path / "exported") == contents(Path(base_config["run_dir"]) / "model")
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (model, tmp_path / "exported"))
    changed = [name for name, value in after.state_dict().items() if not torch.equal(value, before.state_dict()[name])]
    assert changed
    assert_answers_as_exported(loaded, tmp_path / "exported", tmp_path / "nothing")


def assert_answers_as_exported(loaded: LoadedConfig, exported: Path, scratch: Path) -> None:
    """`spurline generate` computes with the exported weights and needs no temporary file. scratch: a missing folder."""
    checkpoint = str(Path(loaded.config.run_dir) / "checkpoints" / "step-00000003")
    with pytest.MonkeyPatch.context() as patch:
        # Whoever makes a temporary file fails.
        patch.setattr(tempfile, "tempdir", str(scratch))
        found = open_run(loaded, checkpoint, silent)
    expected = open_model(ModelConfig(path=str(exported)), silent)
    assert (found.stops, found.sampling, found.context) == (expected.stops, expected.sampling, expected.context)
    assert found.tokenizer.chat_template == expected.tokenizer.chat_template
    state = found.causal.state_dict()
    assert state.keys() == expected.causal.state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in expected.causal.state_dict().items())


def test_a_backend_that_alone_can_read_its_checkpoints_is_built_to_answer(
    base_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = trained(base_config, lora=ADAPTERS)
    monkeypatch.setattr(LocalBackendConfig, "facts", replace(loaded.config.backend.facts, checkpoint_reader=None))
    assert_answers_as_exported(loaded, Path(base_config["run_dir"]) / "model", tmp_path / "nothing")


def test_adapters_are_not_merged_with_weights_that_have_changed_since(base_config: Config, tmp_path: Path) -> None:
    model = Path(shutil.copytree(base_config["model"]["path"], tmp_path / "model"))
    loaded = trained(base_config, model, lora=ADAPTERS)
    name, before = "model.layers.1.mlp.up_proj.weight", set(tmp_path.iterdir())
    weights = load_file(model / "model.safetensors")
    weights[name][0, 0] += 1
    for message in ("other frozen weights", rf"weight {name} .*the files have none"):
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(CheckpointError, match=message):
            export_run(loaded, tmp_path / "exported")
        weights.pop(name, None)
    assert set(tmp_path.iterdir()) == before


@pytest.mark.processes
def test_ranks_answer_prompts_and_export_as_their_checkpoint_is_exported(
    base_config: Config, spurline_chat_file: Path, tmp_path: Path
) -> None:
    base_config["data"]["eval"] = str(spurline_chat_file)
    base_config["evaluation"] = {
        "every_steps": 3,
        "generate": {"rewards": {"exact": "exact_match"}, "max_new_tokens": 4, "max_samples": 5},
    }
    base_config["checkpoint"]["export_adapter"] = True
    one = trained(base_config | {"run_dir": str(tmp_path / "one")}, lora=ADAPTERS)
    many = trained(on_ranks(base_config), lora=ADAPTERS)
    answers = [Path(run.config.run_dir) / "eval_samples.jsonl" for run in (one, many)]
    assert answers[0].read_text() == answers[1].read_text()
    run_dir = Path(many.config.run_dir)
    export_run(many, tmp_path / "exported")
    assert contents(tmp_path / "exported") == contents(run_dir / "model")
    assert_answers_as_exported(many, tmp_path / "exported", tmp_path / "nothing")
    export_run(many, tmp_path / "adapter", adapter=True)
    assert contents(tmp_path / "adapter") == contents(run_dir / "adapter")
    _assert_computes_alike(Path(base_config["model"]["path"]), tmp_path / "adapter", run_dir / "model")


@pytest.mark.usefixtures("reader_alone")
@pytest.mark.parametrize("write", [write_tiny_model, write_tiny_moe_model], ids=["plain", "experts"])
def test_an_adapter_is_exported_without_the_weights_under_it_and_computes_what_the_merged_export_computes(
    base_config: Config, tmp_path: Path, write: Callable[..., Path]
) -> None:
    model = write(tmp_path / "model")
    base_config["checkpoint"]["export_adapter"] = True
    loaded = trained(base_config, model, lora=ADAPTERS)
    run_dir = Path(base_config["run_dir"])
    moved = shutil.move(model / "model.safetensors", tmp_path / "moved")
    answer = CliRunner().invoke(app, ["export", str(run_dir), "--adapter", str(tmp_path / "exported")])
    assert answer.exit_code == 0, answer.output
    shutil.move(moved, model / "model.safetensors")
    assert contents(tmp_path / "exported") == contents(run_dir / "adapter")
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= contents(
        run_dir / "adapter"
    ).keys()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "exported")) == len(AutoTokenizer.from_pretrained(model))
    _assert_computes_alike(model, tmp_path / "exported", run_dir / "model")
    assert load_config(run_dir / "config.json").config == loaded.settled({}).config


def _assert_computes_alike(base: Path, adapter: Path, merged: Path) -> None:
    """The base with the adapter, loaded by PEFT, computes what the merged model computes."""
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    plain, whole, under = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (base, merged, base)
    )
    loaded = PeftModel.from_pretrained(under, adapter)
    tokens = torch.randint(0, plain.config.vocab_size, (3, 17), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        unchanged, expected, got = (model.eval()(tokens).logits for model in (plain, whole, loaded))
    # One adds the adapter to the weights, the other to what they compute: float32 rounds differently.
    torch.testing.assert_close(got, expected, atol=4e-6, rtol=0)
    assert float((expected - unchanged).abs().max()) > 1e-2, "training changed nothing that could be compared"


def test_a_run_without_an_adapter_and_one_of_another_model_are_refused(base_config: Config, tmp_path: Path) -> None:
    loaded = trained(base_config)
    with pytest.raises(UserError, match=r"has no adapter.*without --adapter"):
        export_run(loaded, tmp_path / "exported", adapter=True)
    base_config["model"]["config_overrides"] = {"num_hidden_layers": 1}
    with pytest.raises(CheckpointError, match=r"not in the model \(model\.layers\.1\."):
        export_run(load_config(base_config), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


def test_a_run_that_was_recorded_with_all_packages_is_exported_with_text_and_models(
    base_config: Config, tmp_path: Path
) -> None:
    recorded = json.loads((train(base_config, steps=2).run_dir / "config.json").read_text())
    assert {"critic", "cluster", "report"} <= recorded.keys()
    without = ["-preference", "-environments", "-rl", "-ranks", "-insight", "-planning", "-trackers"]
    loaded = load_config({**recorded, "plugins": without}, recorded=True)
    assert set(loaded.host.plugins) == {"core", "text", "models"}
    export_run(loaded, tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()


def test_an_adapter_of_random_weights_is_refused(base_config: Config, tmp_path: Path) -> None:
    base_config["model"]["init"] = "random"
    base_config["backend"]["lora"] = ADAPTERS
    with pytest.raises(UserError, match="belongs to random weights"):
        export_run(load_config(base_config), tmp_path / "exported", adapter=True)
    base_config["checkpoint"]["export_adapter"] = True
    for lora, fix in ((ADAPTERS, "pretrained weights"), (None, "Set backend.lora")):
        base_config["backend"]["lora"] = lora
        with pytest.raises(ConfigError) as caught:
            load_config(base_config)
        assert_problem(caught, key="checkpoint.export_adapter", fix=fix)


def test_an_export_that_ends_half_way_leaves_nothing(
    base_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = trained(base_config, lora=ADAPTERS)
    before = set(tmp_path.iterdir())
    for interruption in (KeyboardInterrupt(), OSError("disk full")):

        def interrupt(*arguments: Any, error: BaseException = interruption) -> None:
            write_adapter_files(*arguments)
            raise error

        monkeypatch.setattr(export, "write_adapter_files", interrupt)
        with pytest.raises((KeyboardInterrupt, RunFailedError)):
            export_run(loaded, tmp_path / "exported", adapter=True)
        assert set(tmp_path.iterdir()) == before
    monkeypatch.undo()
    base_config["backend"]["lora"] = ADAPTERS | {"rank": 2}
    with pytest.raises(CheckpointError, match=r"lora_A.*is .*\[4, .*but .*\[2, "):
        export_run(load_config(base_config), tmp_path / "exported", adapter=True)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
