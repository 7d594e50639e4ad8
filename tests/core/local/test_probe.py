"""The start-up probe lets exact models pass, and refuses those whose loss would be computed wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from backend_batches import local_backend, write_model_folder

from spurline.errors import ModelError

EXACT = {
    "qwen3": {},
    "llama": {"model_type": "llama"},
    "qwen2-window": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 4},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 4},
    "mixture": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "tied": {"tie_word_embeddings": True},
}


def folder(tmp_path: Path, **changes: Any) -> Path:
    changes = {"architectures": None, **changes}
    return write_model_folder(tmp_path / "model", **changes)


@pytest.mark.parametrize("name", sorted(EXACT))
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_models_with_plain_attention_pass(tmp_path: Path, name: str, precision: str) -> None:
    local_backend(folder(tmp_path, **EXACT[name]), probe=True, precision=precision)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": 30.0},
            r"changes logits after its output layer.*differ by .*final_logit_softcapping: null",
        ),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, "Gemma2Attention uses softcap"),
        ({"model_type": "granite", "logits_scaling": 8.0}, "logits_scaling: 1"),
        ({"model_type": "stablelm"}, "StableLmAttention does not hand the model's keyword arguments"),
        ({"model_type": "mamba"}, "when sequences are packed than separately: .* standard deviations"),
        ({"model_type": "bloom", "pad_token_id": 0}, "does not let its attention be replaced"),
    ],
)
def test_models_that_would_be_trained_wrongly_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        local_backend(folder(tmp_path, **changes), probe=True)


def test_the_softcap_fix_that_the_error_names_works(tmp_path: Path) -> None:
    model = folder(tmp_path, model_type="gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    local_backend(model, probe=True)


def test_a_window_that_attention_is_not_told_of_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ModelError, match=r"2 with a window.* but 2 of them .* 0 with a window"):
        local_backend(folder(tmp_path, model_type="mistral", sliding_window=64), probe=True)


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
