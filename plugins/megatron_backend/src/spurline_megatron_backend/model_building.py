"""Build this rank's parts of a model from Megatron-core's layers. Weights have memory but no values yet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.configs import MegatronBackendConfig
from spurline_megatron_backend.core_attention import SegmentCoreAttention
from spurline_megatron_backend.gpt import Groups, HiddenGPT
from spurline_megatron_backend.grid import Grid

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron-core 0.16.1 uses this name, but defines it only with TransformerEngine.
    cast(Any, moe_utils).te_general_gemm = None

COMPUTED = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of weights and activations, by `precision`."""


class SharedNorm(nn.RMSNorm):
    """An RMS norm with the same weights on all ranks of a tensor group.

    If the ranks divide the tokens, Megatron sums the gradients of these weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **others: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        cast(Any, self.weight).sequence_parallel = config.sequence_parallel


class GroupedExperts(SequentialMLP):
    """The experts of a layer on this rank, with one matrix product for all of them.

    The base class computes one expert after the other. Megatron's own grouped experts need TransformerEngine.
    """

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        hidden = permuted_local_hidden_states
        sizes = cast(Any, self.local_experts[0]).linear_fc2.weight.shape
        # The kernel for GPUs reads rows of 16 bytes.
        if not len(hidden) or any(size % 8 for size in sizes):
            return super().forward(hidden, tokens_per_expert, permuted_probs)
        ends = tokens_per_expert.to(hidden.device, non_blocking=True).cumsum(0, dtype=torch.int32)
        hidden = self._linear("linear_fc1", hidden, ends)
        hidden = weighted_bias_swiglu_impl(hidden, None, permuted_probs.unsqueeze(-1))
        return self._linear("linear_fc2", hidden, ends), None

    def _linear(self, name: str, tokens: Tensor, ends: Tensor) -> Tensor:
        def multiply(tokens: Tensor) -> Tensor:
            weights = torch.stack([getattr(expert, name).weight for expert in self.local_experts])
            return F.grouped_mm(tokens, weights.transpose(1, 2), offs=ends)

        # The backward pass joins the weights again, since a saved copy would take as much memory as the weights.
        product = checkpoint(multiply, tokens, use_reentrant=False, preserve_rng_state=False)
        return cast(Tensor, product)


def build_parts(
    architecture: Architecture, config: MegatronBackendConfig, groups: Groups, *, critic: bool = False
) -> list[HiddenGPT]:
    """Build this rank's parts of the model in order. A critic has a value head instead of the output layer."""
    grid = groups.grid
    settings = transformer_config(architecture, config, grid)
    layer = _layer_spec(architecture)
    layers = grid.layers(architecture.num_layers, groups.place.pipeline)
    device = "cpu" if settings.use_cpu_initialization else torch.cuda.current_device()
    parts = [
        HiddenGPT(
            settings,
            TransformerBlockSubmodules([layer] * len(numbers), cast(Any, SharedNorm)),
            architecture,
            groups,
            critic=critic,
            chunk_tokens=config.chunk_tokens,
            is_first=groups.place.pipeline == 0 and index == 0,
            is_last=groups.place.pipeline == grid.pipeline - 1 and index == len(layers) - 1,
            virtual_stage=index if grid.virtual_stages > 1 else None,
        )
        for index, numbers in enumerate(layers)
    ]
    # Megatron makes routers on the CPU, and would move them only at their first use.
    return [part.to(device) for part in parts]


def transformer_config(architecture: Architecture, config: MegatronBackendConfig, grid: Grid) -> TransformerConfig:
    """Return the settings of Megatron's layers and of its schedules."""
    a, dtype = architecture, COMPUTED[config.computes_in]
    options: dict[str, Any] = {}
    if a.num_experts:
        options |= {
            "num_moe_experts": a.num_experts,
            "moe_router_topk": a.experts_per_token,
            "moe_ffn_hidden_size": a.expert_ffn,
            # A softmax over only the chosen experts makes their weights sum to 1.
            "moe_router_pre_softmax": not a.renormalizes,
            # The choice of experts depends on the last digits of scores.
            "moe_router_dtype": "fp32",
            # With Megatron's balance loss, gradients would depend on the number of micro-batches.
            "moe_router_load_balancing_type": "none",
        }
    if grid.pipeline > 1:
        options["pipeline_model_parallel_layout"] = _pipeline_layout(architecture, grid)
        options["pipeline_dtype"] = dtype
    if config.recompute == "full":
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    elif config.recompute == "selective":
        options |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return TransformerConfig(
        num_layers=a.num_layers,
        hidden_size=a.hidden,
        ffn_hidden_size=a.ffn,
        num_attention_heads=a.heads,
        num_query_groups=a.key_value_heads,
        kv_channels=a.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=a.norm_epsilon,
        qk_layernorm=a.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=a.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Megatron refuses to divide the experts of a model without experts.
        **(grid if a.num_experts else replace(grid, expert=1)).parallel_sizes,
        sequence_parallel=grid.tensor > 1,
        # Interleaved stages exchange tensors of one shape. If stages sent shapes first, these messages would overtake
        # each other.
        variable_seq_lengths=grid.virtual_stages == 1,
        moe_token_dispatcher_type="alltoall",
        batch_p2p_comm=False,
        deallocate_pipeline_outputs=True,
        # Losses are already divided by the normalizer of the mini-batch, so gradients are only summed.
        calculate_per_token_loss=True,
        use_cpu_initialization=config.on == "cpu",
        deterministic_mode=config.deterministic,
        perform_initialization=False,
        bias_activation_fusion=True,
        **options,
    )


def _pipeline_layout(architecture: Architecture, grid: Grid) -> list[list[str]]:
    """Return the names of the layers that each part of the model holds, in order."""
    by_stage = [grid.layers(architecture.num_layers, stage) for stage in range(grid.pipeline)]
    parts = [["decoder"] * len(layers[index]) for index in range(grid.virtual_stages) for layers in by_stage]
    parts[0].insert(0, "embedding")
    parts[-1].append("loss")
    return parts


def _layer_spec(architecture: Architecture) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(
        num_experts=architecture.num_experts or None, qk_layernorm=architecture.qk_norm, normalization="RMSNorm"
    )
    layer: Any = spec.submodules
    attention = layer.self_attention.submodules
    attention.core_attention = SegmentCoreAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = SharedNorm
    if attention.q_layernorm is not IdentityOp:
        attention.q_layernorm = attention.k_layernorm = SharedNorm
    if architecture.num_experts:
        layer.mlp.submodules.experts.module = GroupedExperts
    return spec
