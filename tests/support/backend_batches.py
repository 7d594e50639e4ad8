"""Build small models, runs and batches by hand, before any collator is involved.

`Sample` is a sequence with its loss weights; `lay_out` puts samples into rows in every way the data contract allows.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from spurline.config.run_config import CriticConfig, DataConfig, ModelConfig, RunConfig
from spurline.data import configs
from spurline.data.batch import Ragged, TrainingBatch
from spurline.data.configs import WholeBatchConfig
from spurline.plugins.host import PluginHost
from spurline.protocols.loss import Objective
from spurline.testing.samples import check_batch
from spurline_models.local.backend import LocalBackend
from spurline_models.local.configs import LocalBackendConfig
from spurline_models.losses.configs import CrossEntropyConfig
from spurline_models.losses.cross_entropy import CrossEntropy
from spurline_models.optimizers.configs import AdamWConfig, ConstantConfig
from spurline_ranks.cluster import ClusterConfig
from spurline_rl.training_configs import RolloutCriticConfig
from spurline_text import configs as text_configs

VOCABULARY = 61

TINY_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 3,
    "bos_token_id": 2,
}


def cross_entropy(normalizer: float = 9.0) -> Objective:
    return Objective(CrossEntropy(CrossEntropyConfig()), normalizer)


def write_model_folder(folder: Path, **changes: Any) -> Path:
    """A folder that holds an architecture and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY_QWEN3 | changes), encoding="utf-8")
    return folder


class _RunConfig(RunConfig):
    """The config model with sections that plugins add, but no unions over components."""

    cluster: ClusterConfig = ClusterConfig()
    critic: RolloutCriticConfig | CriticConfig | None = None


def run_config(model: Path | str, /, **sections: Any) -> RunConfig:
    """A run of core's own components; `sections` replaces any of them."""
    optimizer = AdamWConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    values: dict[str, Any] = {
        "model": ModelConfig(path=str(model), init="random"),
        "data": DataConfig(train=(text_configs.HfDatasetConfig(path="unused.jsonl"),)),
        "steps": 10,
        "source": text_configs.SftSourceConfig(),
        "tokenization": text_configs.SequentialTokenizationConfig(),
        "collator": configs.PackedCollatorConfig(),
        "prefetch": configs.SerialPrefetchConfig(),
        "minibatches": WholeBatchConfig(),
        "loss": CrossEntropyConfig(),
        "backend": LocalBackendConfig(),
        "optimizer": optimizer,
        "schedule": ConstantConfig(),
    }
    return _RunConfig(**(values | sections))


def local_backend(model: Path | str, *, run: dict[str, Any] | None = None, **settings: Any) -> LocalBackend:
    """A local backend on CPU with one thread, in fp32; `settings` are those of LocalBackendConfig."""
    defaults = {"device": "cpu", "precision": "fp32", "num_threads": 1, "probe": False}
    config = LocalBackendConfig(**(defaults | settings))
    registry = PluginHost.load([]).registry
    return LocalBackend(config, run=run_config(model, **(run or {})), registry=registry, total_updates=10)


def no_other(role: str) -> NoReturn:
    """Stand for the other models of a run whose loss reads no logits."""
    raise AssertionError(f"the loss reads the logits of '{role}'")


def excite(backend: LocalBackend, seed: int = 0) -> LocalBackend:
    """Move norms away from 1 and matrices away from tiny, so that a wrong gradient cannot hide in a small one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, backend._model.causal.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise.to(parameter), alpha=0.1 if parameter.ndim < 2 else 0.08)
    return backend


PROMPTS = [[5, 6, 7, 8, 9], [11], [20, 21, 22], [30, 31, 32, 33, 34, 35, 36, 37, 38], [12, 13]]


def greedy_without_cache(causal: Any, prompt: list[int], max_new_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """Return the likeliest tokens by the model's own attention, up to one of those to stop at."""
    causal = copy.deepcopy(causal).eval()
    causal.set_attn_implementation("eager")
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(max_new_tokens):
            tokens.append(int(causal(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
            if tokens[-1] in stop:
                break
    return tokens[len(prompt) :]


@dataclass(frozen=True)
class Sample:
    """tokens and loss weights of one sequence; the first weight is 0."""

    uid: str
    tokens: tuple[int, ...]
    weights: tuple[float, ...]


def make_samples(lengths: Sequence[int], seed: int = 0, loss_share: float = 0.7) -> list[Sample]:
    generator = np.random.default_rng(seed)
    samples = []
    for number, length in enumerate(lengths):
        weights = generator.choice([0.0, 0.5, 1.0, 2.0], size=length) * (generator.random(length) < loss_share)
        weights[0] = 0.0
        tokens = generator.integers(4, VOCABULARY, size=length)
        samples.append(Sample(f"sample-{number}", tuple(tokens.tolist()), tuple(weights.tolist())))
    return samples


def lay_out(
    samples: Sequence[Sample],
    rows: Sequence[Sequence[int]] | None = None,
    *,
    length: int | None = None,
    gap: int = 0,
    left: bool = False,
    padding_rows: int = 0,
    unit_ids: Sequence[int] | None = None,
) -> TrainingBatch:
    """Samples by number in rows (one per row by default), padded to `length`.

    gap: padding after each segment, as aligned packing leaves. left: padding at the start of the rows.
    """
    rows = rows if rows is not None else [[number] for number in range(len(samples))]
    needed = max((sum(len(samples[number].tokens) + gap for number in row) for row in rows), default=1)
    length = max(length or 0, needed)
    columns = {
        "input_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "segment_ids": torch.zeros(len(rows), length, dtype=torch.int32),
        "position_ids": torch.zeros(len(rows), length, dtype=torch.int64),
        "loss_weights": torch.zeros(len(rows), length, dtype=torch.float32),
    }
    for row, members in enumerate(rows):
        used = sum(len(samples[number].tokens) + gap for number in members)
        start = length - used if left else 0
        for segment, number in enumerate(members, start=1):
            sample = samples[number]
            where = slice(start, start + len(sample.tokens))
            columns["input_ids"][row, where] = torch.tensor(sample.tokens)
            columns["segment_ids"][row, where] = segment
            columns["position_ids"][row, where] = torch.arange(len(sample.tokens))
            columns["loss_weights"][row, where] = torch.tensor(sample.weights)
            start += len(sample.tokens) + gap
    batch = TrainingBatch(
        tokens=columns,
        segments={
            "uid": Ragged.from_rows([[samples[number].uid for number in row] for row in rows], object),
            "sample": Ragged.from_rows([[0] * len(row) for row in rows], np.int32),
            "turn": Ragged.from_rows([[0] * len(row) for row in rows], np.int32),
            "length": Ragged.from_rows([[len(samples[number].tokens) for number in row] for row in rows], np.int32),
        },
        unit_ids=torch.arange(len(rows)) if unit_ids is None else torch.tensor(unit_ids),
        is_padding_row=torch.zeros(len(rows), dtype=torch.bool),
    )
    if padding_rows:
        batch = batch.pad_rows(len(rows) + padding_rows)
    check_batch(batch)
    return batch
