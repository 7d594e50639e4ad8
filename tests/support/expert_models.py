"""Tiny mixtures of experts, experts to replay in them, and the same computed by hand."""

from __future__ import annotations

import copy
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from backend_batches import Sample, write_model_folder
from torch import Tensor

from spurline.data.batch import TrainingBatch
from spurline_rl.advantages.configs import GrpoConfig
from spurline_rl.configs import RolloutSourceConfig
from spurline_rl.protocols.environment import EnvironmentConfig
from spurline_rl.protocols.rollout_engine import RolloutEngineConfig

LAYERS, EXPERTS, TOP_K = 2, 8, 3


def write_expert_model(folder: Path, **changes: Any) -> Path:
    """An architecture without weights, whose layers have 8 experts, 3 for each token."""
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return write_model_folder(folder, **(experts | changes))


def replaying_source() -> RolloutSourceConfig:
    """Settings of a source that asks for router replay."""
    return RolloutSourceConfig(
        environment=EnvironmentConfig(name="any"),
        engine=RolloutEngineConfig(name="any"),
        advantage=GrpoConfig(),
        router_replay=True,
    )


def random_experts(samples: Sequence[Sample], seed: int = 0, unknown: float = 0.2) -> list[np.ndarray[Any, Any]]:
    """Return int16 [tokens, layers, top_k] for each sample. The experts of a token differ; a share of tokens has -1."""
    random = np.random.default_rng(seed)
    found = []
    for sample in samples:
        shape = (len(sample.tokens), LAYERS, EXPERTS)
        experts = random.random(shape).argsort(-1)[..., :TOP_K].astype(np.int16)
        experts[random.random(len(experts)) < unknown] = -1
        found.append(experts)
    return found


def with_experts(
    batch: TrainingBatch, experts: Sequence[np.ndarray[Any, Any]], rows: Sequence[Sequence[int]] | None = None
) -> TrainingBatch:
    """Return the batch of `lay_out` with the experts of each sample."""
    ids = batch.tokens["segment_ids"]
    rows = rows if rows is not None else [[number] for number in range(len(experts))]
    column = torch.zeros(*ids.shape, *experts[0].shape[1:], dtype=torch.int16)
    for row, members in enumerate(rows):
        for segment, number in enumerate(members, start=1):
            column[row, ids[row] == segment] = torch.from_numpy(experts[number])
    return batch.with_tokens(routed_experts=column)


def by_hand(causal: Any) -> Any:
    """A copy with plain attention whose experts are computed one token at a time, after `chosen[layer]` where it is
    set: experts [T, top_k], -1 where the router chooses. No hook, and nothing of the router's own code."""
    copied = copy.deepcopy(causal)
    copied.set_attn_implementation("eager")
    # Recomputation in the backward pass would use the experts of the last sample.
    copied.activation_checkpointing_disable()
    copied.chosen = None
    for number, layer in enumerate(copied.model.layers):
        for module in (layer.self_attn, layer.mlp.gate):
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                hooks.clear()

        def forward(block: Any, hidden: Tensor, number: int = number) -> Tensor:
            tokens = hidden.reshape(-1, hidden.shape[-1])
            outputs = [
                _mix(block, token, None if copied.chosen is None else copied.chosen[position, number])
                for position, token in enumerate(tokens)
            ]
            return torch.stack(outputs).view_as(hidden)

        layer.mlp.forward = types.MethodType(forward, layer.mlp)
    return copied


def _mix(block: Any, token: Tensor, chosen: Any) -> Tensor:
    probabilities = (block.gate.weight @ token).exp()
    probabilities = probabilities / probabilities.sum()
    if chosen is None or chosen[0] < 0:
        chosen = probabilities.argsort(descending=True)[: block.gate.top_k].tolist()
    weights = torch.stack([probabilities[int(expert)] for expert in chosen])
    if block.gate.norm_topk_prob:
        weights = weights / weights.sum()
    total = torch.zeros_like(token)
    for weight, expert in zip(weights, chosen, strict=True):
        gate, up = (block.experts.gate_up_proj[int(expert)] @ token).chunk(2)
        total = total + weight * (block.experts.down_proj[int(expert)] @ (F.silu(gate) * up))
    return total


def loss_by_hand(causal: Any, samples: Sequence[Sample], experts: Sequence[Any], normalizer: float) -> Tensor:
    """Return the weighted cross-entropy of the model of `by_hand`, one sample at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for sample, chosen in zip(samples, experts, strict=True):
        causal.chosen = chosen
        logits = causal(input_ids=torch.tensor([sample.tokens]), use_cache=False).logits[0]
        losses = F.cross_entropy(logits[:-1], torch.tensor(sample.tokens[1:]), reduction="none")
        total = total + (losses * torch.tensor(sample.weights[1:])).sum()
    return total / normalizer
