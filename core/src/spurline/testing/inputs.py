"""What contract tests are fed: random samples and trajectories, a tiny model and tokenizer, settings of hypothesis.

The same arguments give the same data. The model is made from a config, without any download.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings

from spurline.data.token_store import TokenStore, TokenStoreBuilder, TokenView
from spurline.rl.trajectory import Trajectory, Turn


def fuzzing(max_examples: int) -> settings:
    """Settings for a test in a suite that several classes inherit, each of which counts as another executor."""
    return settings(max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.differing_executors])


PAD = 0
VOCABULARY = 128


def make_store(lengths: Sequence[int], seed: int = 0, vocabulary: int = VOCABULARY) -> TokenStore:
    """A store with samples of these lengths: random tokens (never `PAD`), random loss masks, first token without."""
    random = np.random.default_rng(seed)
    builder = TokenStoreBuilder(["random"])
    for row, length in enumerate(lengths):
        tokens = random.integers(1, vocabulary, length)
        mask = (random.random(length) < 0.6).astype(np.uint8)
        mask[:1] = 0
        builder.add(tokens.tolist(), mask.tolist(), source=0, row=row)
    return builder.build()


def make_view(lengths: Sequence[int], seed: int = 0) -> TokenView:
    """All samples of `make_store`, in order."""
    store = make_store(lengths, seed)
    return store.view(np.arange(len(store), dtype=np.int64))


def make_trajectories(
    turns: Sequence[Sequence[tuple[int, int]]],
    seed: int = 0,
    *,
    optional_columns: bool = True,
    routed_experts: bool = False,
) -> list[Trajectory]:
    """One trajectory per entry; each turn is given by its (prompt, response) token counts.

    routed_experts: whether turns also have expert indices, of 2 layers and 3 experts a token.
    """
    random = np.random.default_rng(seed)
    return [
        Trajectory(
            uid=f"prompt-{number}",
            sample=number % 3,
            turns=tuple(
                _turn(random, prompt, response, optional_columns, routed_experts) for prompt, response in shape
            ),
        )
        for number, shape in enumerate(turns)
    ]


def _turn(
    random: np.random.Generator, prompt: int, response: int, optional_columns: bool, routed_experts: bool
) -> Turn:
    floats = random.standard_normal((5, response)).astype(np.float32)
    return Turn(
        prompt_ids=random.integers(1, VOCABULARY, prompt).astype(np.int32),
        response_ids=random.integers(1, VOCABULARY, response).astype(np.int32),
        loss_mask=(random.random(response) < 0.8).astype(np.uint8),
        logprobs=floats[0] if optional_columns else None,
        rewards=floats[1] if optional_columns else None,
        advantages=floats[2] if optional_columns else None,
        values=floats[3] if optional_columns else None,
        returns=floats[4] if optional_columns else None,
        versions=random.integers(0, 4, response).astype(np.int32) if optional_columns else None,
        routed_experts=random.integers(0, 64, (prompt + response, 2, 3)).astype(np.int16) if routed_experts else None,
    )


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A two-layer Qwen3 with random weights and norms, and a byte-level tokenizer with a ChatML template.

    overrides: fields of Qwen3Config to change. Returns the folder, which `from_pretrained` loads.
    """
    from transformers import Qwen3Config

    return write_model(folder, Qwen3Config, overrides, seed=seed)


def write_tiny_moe_model(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """The same of Qwen3-MoE: 8 experts in each layer, of which a token has 2. overrides: fields of Qwen3MoeConfig."""
    from transformers import Qwen3MoeConfig

    experts: dict[str, Any] = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    return write_model(folder, Qwen3MoeConfig, experts | overrides, seed=seed)


def write_model(folder: Path, config: type[Any], overrides: dict[str, Any], *, seed: int = 0) -> Path:
    """The same of any architecture. config: its class in transformers. overrides: fields to change, None to leave one
    to the class."""
    import torch
    from transformers import AutoModelForCausalLM

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
    fields = {name: value for name, value in fields.items() if value is not None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config(**fields), dtype=torch.float32)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Fresh norms are all ones and fresh biases all zeros, which hides mistakes in their handling.
                is_constant = "norm" in name or name.endswith("bias")
                parameter.add_(0.1 * torch.randn_like(parameter)) if is_constant else parameter.mul_(4)
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
