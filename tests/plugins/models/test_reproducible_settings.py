"""Settings with which results would depend on ranks or micro-batches are refused with `sums: reproducible`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_problem

from spurline import load_config
from spurline.errors import ConfigError
from spurline_models.testing.inputs import write_model

CONFIG: dict[str, Any] = {
    "model": {"path": "unused"},
    "data": {"train": "unused.jsonl"},
    "steps": 2,
    "backend": {"device": "cpu", "num_threads": 1, "sums": "reproducible"},
}
FSDP: dict[str, Any] = {"plugins": ["fsdp_backend"], "backend": {**CONFIG["backend"], "name": "fsdp", "ranks": 4}}


def with_backend(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {**CONFIG, **config, "backend": {**CONFIG["backend"], **config.get("backend", {}), **settings}}


@pytest.mark.parametrize(
    ("config", "key", "said"),
    [
        (with_backend({"optimizer": "muon"}), "sums", "optimizer muon"),
        (with_backend({}, compile=True), "sums", "does not support compile"),
        (with_backend({}, lora={"dropout": 0.1}), "sums", "lora.dropout"),
        (with_backend({}, precision="fp64"), "sums", "precision: fp64"),
        (with_backend({}, precision="bf16"), "sums", "bf16 on a CPU"),
        (with_backend({}, fp8="emulated"), "sums", "fp8"),
        (with_backend({"model": {"path": "unused", "router_aux_loss": 0.1}}), "sums", "router_aux_loss"),
        (with_backend({}, num_threads=None), "num_threads", "matrix products"),
        (with_backend({}, precision="bf16", device="cuda", weights="bf16_masters"), "weights", "bf16_masters"),
        (with_backend(FSDP, context=2), "sums", "context: 2"),
        (with_backend(FSDP, replicas=2), "sums", "replicas: 2"),
        (with_backend(FSDP, num_threads=None), "num_threads", "matrix products"),
        (with_backend(FSDP, device="cuda"), "deterministic", "Set it"),
        (
            {**CONFIG, "plugins": ["megatron_backend"], "backend": {"name": "megatron", "sums": "reproducible"}},
            "sums",
            "name: fsdp",
        ),
    ],
)
def test_a_setting_that_would_change_bits_is_named(config: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert_problem(caught, key=f"backend.{key}", fix=said)


def test_a_model_with_dropout_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    path = write_model(tmp_path, LlamaConfig, {"attention_dropout": 0.1})
    run = load_config({**CONFIG, "model": {"path": str(path)}}).config
    with pytest.raises(ConfigError, match=r"attention_dropout at 0\.1"):
        run.backend.check_model(run)
    overridden = {"path": str(path), "config_overrides": {"attention_dropout": 0.0}}
    run = load_config({**CONFIG, "model": overridden}).config
    run.backend.check_model(run)
