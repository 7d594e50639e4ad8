"""A model and tokenizer small enough for contract tests, made from a config without any download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from spurline.testing.data import VOCABULARY

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A two-layer Qwen3 with random weights and norms, and a byte-level tokenizer with a ChatML template.

    overrides: fields of Qwen3Config to change. Returns the folder, which `from_pretrained` loads.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    tokenizer = tiny_tokenizer()
    fields: dict[str, Any] = {
        "vocab_size": max(VOCABULARY, len(tokenizer)),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **overrides,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(Qwen3Config(**fields), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Freshly initialised norms are all ones, which hides mistakes in their handling.
                parameter.add_(0.1 * torch.randn_like(parameter)) if "norm" in name else parameter.mul_(4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer() -> Any:
    """A byte-level tokenizer: one token per byte, plus pad, <|im_start|> and <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
