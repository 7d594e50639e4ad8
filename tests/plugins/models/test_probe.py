"""The start-up probe lets exact models pass, and refuses those whose loss would be computed wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import cross_entropy, lay_out, local_backend, make_samples, write_model_folder
from transformers import AutoConfig, AutoModelForCausalLM

from spurline.config.run_config import DataConfig, ModelConfig
from spurline.errors import DataError, ModelError
from spurline_models import probe
from spurline_models.device_profile import device_profile
from spurline_models.streams.stream_model import StreamModel
from spurline_text import configs as text_configs


def folder(tmp_path: Path, **changes: Any) -> Path:
    changes = {"architectures": None, **changes}
    return write_model_folder(tmp_path / "model", **changes)


def test_a_model_that_sees_later_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"than for each sequence alone: .*standard dev.* looks at later tokens"):
        local_backend(folder(tmp_path, model_type="bert", is_decoder=False), probe=True)


@pytest.mark.parametrize("probe", [True, False])
def test_a_model_that_mixes_tokens_outside_of_attention_reads_rows(tmp_path: Path, probe: bool) -> None:
    """Also where nothing is refused: packed, its gradients would be wrong without a word."""
    backend = local_backend(folder(tmp_path, model_type="mamba"), probe=probe)
    assert backend._model.reading == "rows"
    assert backend.facts()["reads"] == "a row for each sequence"


def test_dropout_of_the_models_own_config_is_applied_and_said(tmp_path: Path) -> None:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "pad_token_id": 0}
    backend = local_backend(folder(tmp_path, model_type="gpt2", **sizes))
    assert backend.facts()["draws"] == "resid_pdrop 0.1, embd_pdrop 0.1, attn_pdrop 0.1"
    objective = cross_entropy(1.0)
    samples = make_samples([5, 7, 9, 12])
    norms = []
    for seed, rows in ((0, None), (0, [[0, 1], [2, 3]]), (1, None)):
        torch.manual_seed(seed)
        gradients = backend.gradients(lay_out(samples, rows, gap=1), objective)
        norms.append([float(value.norm()) for _, value in gradients])
    # Packed and padded rows of one order are the same stream, with the same draws; other draws give other gradients.
    assert norms[0] == norms[1] != norms[2]
    assert backend.evaluate(lay_out(samples), objective).loss == backend.evaluate(lay_out(samples), objective).loss


def test_a_model_whose_attention_is_not_told_of_its_window_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.mistral import modeling_mistral

    real = modeling_mistral.MistralAttention.forward

    def without_window(self: Any, *arguments: Any, **kwargs: Any) -> Any:
        window, self.config.sliding_window = self.config.sliding_window, None
        try:
            return real(self, *arguments, **kwargs)
        finally:
            self.config.sliding_window = window

    monkeypatch.setattr(modeling_mistral.MistralAttention, "forward", without_window)
    # Longer than the probe's sequences, so that no number differs.
    backend = local_backend(folder(tmp_path, model_type="mistral", sliding_window=64), probe=True)
    assert backend._model.reading == "rows"
    assert backend.facts()["reads"] == "a row for each sequence"


def test_a_window_in_the_config_of_a_model_without_windows_costs_nothing(tmp_path: Path) -> None:
    backend = local_backend(folder(tmp_path, model_type="olmo", sliding_window=64), probe=True)
    assert backend._model.reading == "stream"
    assert backend._model.causal.config.sliding_window == 64


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
SWITCHING = {
    "longrope": {"rope_parameters": LONGROPE},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
    "old-spelling": {
        "model_type": "llama",
        "rope_parameters": None,
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 16,
    },
    "per-layer-type": {
        "model_type": "gemma3_text",
        "max_position_embeddings": 16,
        "rope_parameters": {"full_attention": DYNAMIC, "sliding_attention": PLAIN},
    },
}


def up_to(max_length: int) -> dict[str, Any]:
    return {"data": DataConfig(train=(text_configs.HfDatasetConfig(path="unused.jsonl"),), max_length=max_length)}


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("name", sorted(SWITCHING))
def test_rope_that_switches_with_the_longest_sample_is_refused(tmp_path: Path, name: str, probe: bool) -> None:
    kind = "longrope" if name == "longrope" else "dynamic"
    with pytest.raises(ModelError, match=rf"'{kind}'.*longest.*data\.max_length: 16"):
        local_backend(folder(tmp_path, **SWITCHING[name]), probe=probe, run=up_to(17))


def test_a_batch_beyond_the_length_at_which_rope_switches_is_refused(tmp_path: Path) -> None:
    backend = local_backend(folder(tmp_path, **SWITCHING["dynamic"]), run=up_to(16))
    with pytest.raises(DataError, match=r"17 tokens.*'dynamic'.*16"):
        backend.update(lay_out(make_samples([5, 17])), cross_entropy(1.0))


MIXTURES = {
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},
}


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_a_mixture_whose_router_loss_would_be_dropped_is_refused(tmp_path: Path, name: str) -> None:
    model = folder(tmp_path, output_router_logits=True, **MIXTURES[name])
    with pytest.raises(ModelError, match=r"auxiliary.*model\.config_overrides: \{output_router_logits: false\}"):
        local_backend(model)
    fixed = ModelConfig(path=str(model), init="random", config_overrides={"output_router_logits": False})
    local_backend(model, run={"model": fixed})


def test_the_probe_leaves_no_trace(tmp_path: Path) -> None:
    model = folder(tmp_path)
    probed, plain = local_backend(model, probe=True), local_backend(model, probe=False)
    causal = probed._model.causal
    assert causal.training
    assert causal.config._attn_implementation == "spurline_segments"
    assert all(parameter.grad is None for parameter in causal.parameters())
    assert not probed._model.decoder._forward_hooks
    for (name, one), (_, other) in zip(probed.named_weights(), plain.named_weights(), strict=True):
        assert torch.equal(one, other), name


def in_bf16(kind: str, num_layers: int, deviation: float) -> StreamModel:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 512, "num_hidden_layers": num_layers, "head_dim": 16, "num_local_experts": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, initializer_range=deviation, **sizes)
    return StreamModel(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))


@pytest.mark.parametrize(("kind", "deviation"), [("llama", 0.3), ("mixtral", 0.1)])
def test_deep_models_in_half_precision_pass_packed_unless_segments_see_each_other(
    kind: str, deviation: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 layers, each of which enlarges the differences of rounding."""
    model = in_bf16(kind, 64, deviation)
    profile = device_profile("cpu")
    probe.check_exactness(model, profile, "deep", in_half_precision=True)
    assert model.reading == "stream"
    plan = probe.plan_segments
    monkeypatch.setattr(probe, "plan_segments", lambda lengths, *rest: plan(lengths.sum(keepdims=True), *rest))
    with pytest.raises(ModelError, match="than for each sequence alone"):
        probe.check_exactness(model, profile, "deep", in_half_precision=True)


def test_a_model_in_half_precision_whose_mlps_see_the_previous_token_reads_rows() -> None:
    """A segment's first tokens then differ, and the mean over all tokens only a little."""

    def add_previous(module: Any, arguments: Any) -> Any:
        return arguments[0] + 0.3 * torch.nn.functional.pad(arguments[0], (0, 0, 1, 0))[:, :-1]

    model = in_bf16("llama", 16, 0.05)
    probe.choose_reading(model, device_profile("cpu"), in_half_precision=True)
    assert model.reading == "stream"
    for layer in model.decoder.layers:
        layer.mlp.register_forward_pre_hook(add_previous)
    probe.choose_reading(model, device_profile("cpu"), in_half_precision=True)
    assert model.reading == "rows"
