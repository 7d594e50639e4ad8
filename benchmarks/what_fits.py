"""Print which models fit on one GPU: the memory of a step by model and method, as `spurline plan` estimates it.

    python benchmarks/what_fits.py [--json] [--many]

The models are the dense models of Qwen3, built on the meta device from their public shapes. So the script needs no
weights and no GPU. Each figure is the estimated total that `spurline plan` prints for the settings below. A method fits
if the estimate leaves a tenth of the GPU free, for the CUDA context and gaps between allocations.

Settings: backend `local` (weights, gradients and AdamW in fp32, computation in bf16), activation checkpointing, and
micro-batches of 8,192 tokens. RL: 32 prompts x 8 attempts, prompts of 512 and responses of 1,024 tokens, engine
`in_process`, no reference model. LoRA: rank 16 on all linear layers. `--many` prints the memory of each of several GPUs
with the backend `fsdp`, for supervised fine-tuning of all weights and of adapters with the same settings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import Qwen3Config

from spurline.config.loading import load_config
from spurline_planning.fit import Load, estimate_load
from spurline_planning.protocols import planned

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 40, "num_attention_heads": 40},
    "Qwen3-32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
"""Values in `config.json` of each model on the Hugging Face hub."""

SHARED: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
TIED = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B")
"""Models whose output layer shares the weights of the embedding."""

GPUS_GIB = (24, 48, 80, 141)
SHARE_USED = 0.9

SAMPLE_TOKENS, MICROBATCH_TOKENS = 2048, 8192
PROMPT_TOKENS, RESPONSE_TOKENS = 512, 1024
BACKEND = {"precision": "bf16", "activation_checkpointing": True, "max_tokens_per_microbatch": MICROBATCH_TOKENS}
LORA = {**BACKEND, "lora": {"rank": 16}}
ROLLOUTS = {
    "name": "rollouts",
    "prompts_per_step": 32,
    "samples_per_prompt": 8,
    "environment": {"name": "single_turn", "rewards": {"exact_match": "exact_match"}},
    "sampling": {"max_new_tokens": RESPONSE_TOKENS},
}
METHODS: dict[str, dict[str, Any]] = {
    "SFT, LoRA": {"backend": LORA},
    "SFT, all weights": {"backend": BACKEND},
    "RL, LoRA": {"backend": LORA, "source": ROLLOUTS},
    "RL, all weights": {"backend": BACKEND, "source": ROLLOUTS},
}


RANKS = (2, 4, 8, 16, 64)


def measure(methods: Mapping[str, Mapping[str, Any]] = METHODS) -> dict[str, dict[str, float]]:
    """Return the GiB of each model and method."""
    found: dict[str, dict[str, float]] = {}
    for name, shape in MODELS.items():
        with TemporaryDirectory() as folder:
            config = Qwen3Config(**shape, **SHARED, tie_word_embeddings=name in TIED, dtype="bfloat16")
            config.save_pretrained(folder)
            found[name] = {method: _estimate(Path(folder), settings) for method, settings in methods.items()}
    return found


def on_many_gpus() -> dict[str, dict[str, Any]]:
    """Return the settings of each column, by its heading."""

    def on(ranks: int, **more: Any) -> dict[str, Any]:
        backend = {**BACKEND, "name": "fsdp", "device": "cuda", "ranks": ranks, **more}
        return {"plugins": ["fsdp_backend"], "backend": backend}

    methods = {f"all weights, {ranks} GPUs": on(ranks) for ranks in RANKS}
    return methods | {"LoRA, 8 GPUs": on(8, lora={"rank": 16})}


def _estimate(model: Path, settings: Mapping[str, Any]) -> float:
    data = {"train": "rows.jsonl", "max_length": SAMPLE_TOKENS}
    loaded = load_config({"model": {"path": str(model)}, "data": data, "steps": 1, **settings})
    rollouts = planned(loaded.config.source)
    # Each rank has one micro-batch.
    tokens = MICROBATCH_TOKENS * loaded.config.backend.layout().data
    row_length = SAMPLE_TOKENS
    generation: Mapping[str, int] = {}
    if rollouts is not None:
        update = rollouts.largest_update(loaded.config, PROMPT_TOKENS, None)
        row_length, tokens = update.row_length, update.tokens
        generation = rollouts.generation_memory(loaded.config, PROMPT_TOKENS, None)
    estimate = estimate_load(loaded.config, Load(row_length, tokens, generation))
    assert estimate is not None
    return estimate.peak / 2**30


def as_cell(gib: float) -> str:
    """Return the estimate, and the smallest GPU on which it fits."""
    smallest = next((gpu for gpu in GPUS_GIB if gib <= SHARE_USED * gpu), None)
    return f"{gib:,.0f} GiB: " + (f"{smallest} GiB GPU" if smallest else "more than one GPU")


def as_size(gib: float) -> str:
    """Return only the estimate."""
    return f"{gib:,.0f} GiB"


def main() -> None:
    """Print the table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--many", action="store_true", help="memory of each of several GPUs with the backend fsdp")
    arguments = parser.parse_args()
    methods = on_many_gpus() if arguments.many else METHODS
    figures = measure(methods)
    if arguments.json:
        print(json.dumps({"gib": figures, "gpus_gib": GPUS_GIB, "share_used": SHARE_USED}, indent=2))
        return
    print(f"| model | {' | '.join(methods)} |")
    print(f"|---|{'---|' * len(methods)}")
    for name, by_method in figures.items():
        print(f"| {name} | {' | '.join(map(as_size if arguments.many else as_cell, by_method.values()))} |")


if __name__ == "__main__":
    main()
