"""Build a causal language model whose parameters are sharded over the ranks. No rank trains with a whole copy.

Data flow: a model folder -> a model on the meta device -> FSDP2 -> each rank reads its parts of the weights ->
a `ShardedStreamModel`, which computes like any `StreamModel`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError
from spurline.protocols.loss import TokenLossInputs
from spurline_fsdp_backend.configs import FsdpBackendConfig
from spurline_fsdp_backend.exact_reduction import reduce_exactly
from spurline_fsdp_backend.mesh import EXPERT, EXPERT_SHARD, Meshes
from spurline_fsdp_backend.weight_loading import load_weights
from spurline_models.architecture import (
    ScalarHead,
    build_without_memory,
    decoder_layers,
    load_model_config,
    num_experts,
    output_layer,
)
from spurline_models.device_profile import DeviceProfile, device_profile
from spurline_models.kernels import change_computing
from spurline_models.optimizers.groups import freeze_parameters
from spurline_models.placement.narrow_weights import base_dtype
from spurline_models.probe import check_exactness, check_routers, choose_reading
from spurline_models.streams.stream_model import ScoreModel, StreamModel, ValueModel, excited, idle_pass, put_value_head
from spurline_models.streams.token_logprobs import LogitReading
from spurline_models.streams.token_stream import Bucket, SegmentPlan, TokenStream
from spurline_models.weights import without_adapters
from spurline_ranks.checkpoint import digest_of_ranks
from spurline_ranks.pieces import Box, held_box, held_values
from spurline_ranks.sequence_sharing import SequenceSharing, check_sharing

_DISPATCHES = "ep_dispatch_experts"
"""The style that the parallel plans of transformers give to modules that send tokens to other ranks."""

_SCORE, _STATES = "spurline_score", "spurline_states"
"""Names of forward methods that are added to the whole model."""


class ShardedStreamModel(StreamModel):
    """A `StreamModel` whose parameters are sharded.

    `StreamModel` calls the decoder, then the output layer. But FSDP2 gathers embedding, last norm and output layer only
    for a forward pass of the whole model. So this class makes both calls within one forward pass of the whole model.
    """

    sharing: SequenceSharing | None = None
    """The ranks that compute one stream together, if they share sequences."""

    def states(self, stream: TokenStream) -> Tensor:
        """Return the states of this rank's part of the stream. The output layer stays gathered."""
        part = stream if self.sharing is None else self.sharing.part_of(stream)[0]
        return self._forward(_STATES, self._states, part)

    def loss_inputs(
        self, stream: TokenStream, needs: Collection[str], temperature: float = 1.0, reading: LogitReading | None = None
    ) -> TokenLossInputs:
        logprobs, entropy, columns = self._forward(_SCORE, self._score, stream, needs, temperature, reading)
        return TokenLossInputs(logprobs, stream.segment_index, stream.plan.num_segments, columns, entropy)

    def _forward(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        """Call the method within a forward pass of the whole model."""
        if not hasattr(self.causal, name):
            setattr(self.causal, name, types.MethodType(lambda _, *given: method(*given), self.causal))
            register_fsdp_forward_method(self.causal, name)
        return getattr(self.causal, name)(*args)

    def _score(
        self, stream: TokenStream, needs: Collection[str], temperature: float, reading: LogitReading | None
    ) -> tuple[Tensor, Tensor | None, Mapping[str, Tensor]]:
        # FSDP2 looks for tensors with gradients in tuples and dicts, not in dataclasses.
        part, mine = (stream, slice(None)) if self.sharing is None else self.sharing.part_of(stream)
        inputs = super().loss_inputs(part, needs, temperature, reading)
        if self.sharing is None:
            return inputs.logprobs, inputs.entropy, inputs.columns
        join = partial(self.sharing.joined, mine=mine, stream=stream)
        made = {name: join(values) for name, values in inputs.columns.items() if name not in part.columns}
        entropy = None if inputs.entropy is None else join(inputs.entropy)
        return join(inputs.logprobs), entropy, {**stream.columns, **made}

    def _row_passes(self, plan: SegmentPlan, device: torch.device) -> Sequence[Bucket]:
        """Return equally many passes on all ranks, since they gather each layer together. This is a collective."""
        passes = super()._row_passes(plan, device)
        most = torch.tensor(len(passes))
        dist.all_reduce(most, dist.ReduceOp.MAX)
        idle = idle_pass(int(plan.lengths.sum()), DeviceProfile(device).send)
        return [*passes, *[idle] * (int(most) - len(passes))]


class ShardedValueModel(ShardedStreamModel, ValueModel):
    """A `ValueModel` whose parameters are sharded."""


class ShardedScoreModel(ShardedStreamModel, ScoreModel):
    """A `ScoreModel` whose parameters are sharded."""


def build_trained(
    model: ModelConfig, config: FsdpBackendConfig, meshes: Meshes, seed: int, *, critic: bool = False
) -> ShardedStreamModel:
    """Build and load a model in training mode. This is a collective. Raises ModelError.

    Without adapters the weights are in fp32. With adapters all other weights are frozen and in `base_dtype`. A critic
    has a value head, which is trained in fp32, instead of the output layer.
    """
    if config.lora is None:
        causal = _build(model, config, meshes, seed, torch.float32, critic=critic, freezes=True)
    else:
        from spurline_models.adapters.lora import add_adapters

        dtype = base_dtype(config.lora, model)
        plain = _build(model, config, meshes, seed, dtype, critic=critic)
        causal = _without_values(model, config, dtype)
        add_adapters(causal, config.lora, seed)
        if critic:
            put_value_head(causal, torch.float32)
        shard(causal, config, meshes)
        _take_over(causal, plain)
        _draw_adapters(causal, seed, plain.device)
    made = ShardedValueModel(causal) if critic else _stream_model(model, causal, config)
    if config.offload_activations:
        made.offload_activations()
    return _sharing(made, config, meshes)


def build_frozen(
    model: ModelConfig, config: FsdpBackendConfig, meshes: Meshes, seed: int, check: Callable[[str], None]
) -> ShardedStreamModel:
    """Build a model that is not trained, with weights in the dtype of computations. This is a collective.

    `check` gets the digest of the weights, and raises an error if they are not the right ones.
    """
    causal = _build(model, config, meshes, seed, torch.float32, critic=False)
    check(weights_digest(causal))
    causal.requires_grad_(False).eval()
    if config.computes_in == "bf16":
        cast_parameters(causal, torch.bfloat16)
    return _sharing(_stream_model(model, causal, config), config, meshes)


def _stream_model(model: ModelConfig, causal: PreTrainedModel, config: FsdpBackendConfig) -> ShardedStreamModel:
    kind = ShardedScoreModel if model.head == "score" else ShardedStreamModel
    return kind(causal, config.chunk_tokens, config.fuses_logprobs)


def _sharing(model: ShardedStreamModel, config: FsdpBackendConfig, meshes: Meshes) -> ShardedStreamModel:
    if meshes.context is not None:
        model.sharing = SequenceSharing(meshes.context, device_profile(config.on))
    return model


def _take_over(adapted: PreTrainedModel, plain: PreTrainedModel) -> None:
    """Move parameters and buffers of a model without adapters into the adapted model. Both have the same sharding."""
    places = {
        without_adapters(f"{path}.{leaf}" if path else leaf): (module, leaf)
        for path, module in adapted.named_modules()
        for leaf in (*module._parameters, *module._buffers)
    }
    # A tied parameter is listed under both of its names.
    for name, value in plain.named_parameters(remove_duplicate=False):
        owner, leaf = places[name]
        value.requires_grad_(owner.get_parameter(leaf).requires_grad)
        owner.register_parameter(leaf, value)
    for name, buffer in plain.named_buffers():
        owner, leaf = places[name]
        owner.register_buffer(leaf, buffer, persistent=leaf not in owner._non_persistent_buffers_set)


def _draw_adapters(adapted: PreTrainedModel, seed: int, device: torch.device) -> None:
    """Give each adapter the initial values that all backends use. Each rank copies only its shard."""
    from spurline_models.adapters.lora import initial_adapters

    for name, whole in initial_adapters(adapted, seed):
        value = adapted.get_parameter(name)
        path, _, leaf = name.rpartition(".")
        assert isinstance(value, DTensor), name
        part = whole[held_box(value).slices_in(Box.whole(value.shape))]
        local = part.to(device, value.dtype).contiguous()
        shard = DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
        adapted.get_submodule(path).register_parameter(leaf, Parameter(shard))


def _build(
    model: ModelConfig,
    config: FsdpBackendConfig,
    meshes: Meshes,
    seed: int,
    dtype: torch.dtype,
    *,
    critic: bool,
    freezes: bool = False,
) -> PreTrainedModel:
    causal = _without_values(model, config, dtype)
    if freezes:
        freeze_parameters(causal, model.freeze)
    if critic:
        # The head is always in fp32, since differences of its values must be exact.
        put_value_head(causal, torch.float32)
    shard(causal, config, meshes)
    # With `cpu_offload` the shards may be too large for the device.
    load_weights(causal, model, seed, "cpu" if config.cpu_offload else config.on)
    for module in causal.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(config.on)
    return causal


def _without_values(model: ModelConfig, config: FsdpBackendConfig, dtype: torch.dtype) -> PreTrainedModel:
    causal = build_without_memory(load_model_config(model), model)
    change_computing(causal, model, config.kernels, config.fp8, device_profile(config.on))
    cast_parameters(causal, dtype)
    return causal.train()


def shard(causal: PreTrainedModel, config: FsdpBackendConfig, meshes: Meshes) -> None:
    """Shard every parameter in FSDP2 groups: each decoder layer, its divided experts, a value head, and all the rest.

    The gradients of a step are sums over ranks and micro-batches, in fp32.
    """
    if config.activation_checkpointing:
        StreamModel(causal).checkpoint_activations({"use_reentrant": False}, config.activation_checkpointing)
    if config.compile:
        StreamModel(causal).compile()
    computing = torch.bfloat16 if config.computes_in == "bf16" else torch.float32
    options: dict[str, Any] = {
        "mesh": meshes.sharding,
        "mp_policy": MixedPrecisionPolicy(param_dtype=computing, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=config.on == "cuda") if config.cpu_offload else OffloadPolicy(),
    }
    if meshes.experts is not None and num_experts(causal.config.get_text_config()) is not None:
        # Experts have a mesh of their own. They are sharded first, so that their layers do not shard them again.
        for holder in _divide_experts(causal, meshes):
            apart = {**options, "mesh": meshes.experts[EXPERT_SHARD]}
            fully_shard(holder, reshard_after_forward=_reshards(holder, causal, config), **apart)
    for layer in decoder_layers(causal):
        fully_shard(layer, reshard_after_forward=_reshards(layer, causal, config), **options)
    head = output_layer(causal)
    if isinstance(head, ScalarHead):
        # A head for values or scores computes in fp32, since differences of its values must be exact.
        exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(head, reshard_after_forward=_reshards(head, causal, config), **{**options, "mp_policy": exact})
    # Embedding, last norm and output layer are one group, since a tied weight must not belong to two groups.
    fully_shard(causal, reshard_after_forward=_reshards(causal, causal, config), **options)
    for module in sharded_modules(causal):
        module.set_gradient_divide_factor(1.0)
        # gloo has no scaled sum, and with scaled sums NCCL loses some bf16 gradients (pytorch issue 190745).
        module.set_force_sum_reduction_for_comms(True)
        if config.is_reproducible:
            reduce_exactly(module, meshes.sharding.size())


def _divide_experts(causal: PreTrainedModel, meshes: Meshes) -> list[nn.Module]:
    """Give whole experts to each rank of a group; return the modules that hold experts. Raises ModelError."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism  # transformers 5.23, see the config

    assert meshes.experts is not None
    assert meshes.alone is not None
    group, path = meshes.experts[EXPERT], causal.config.name_or_path
    plan = causal._expand_parallel_plan(dict(causal.ep_plan or {}))
    holders = [causal.get_submodule(name) for name, style in plan.items() if style == _DISPATCHES]
    if not holders:
        raise ModelError(
            f"backend.expert is {group.size()}, and transformers cannot divide the experts of {path}, a "
            f"{type(causal).__name__}. Set expert to 1 to shard experts like other weights."
        )
    # `all_to_all` sends tokens to their experts, and results back. In evaluation `auto` would sum over the group, which
    # is wrong here because each rank has its own tokens.
    apply_expert_parallelism(causal, group, meshes.alone, plan, ep_implementation="all_to_all")
    return holders


def weights_digest(module: nn.Module, *, frozen: bool = False) -> str:
    """Return the digest of all (or all frozen) parameters, the same for any number of ranks. This is a collective."""
    parameters = {name: value for name, value in module.named_parameters() if not (frozen and value.requires_grad)}
    device = next((held_values(value).device for value in parameters.values()), torch.device("cpu"))
    held = ((name, held_box(value), held_values(value)) for name, value in parameters.items())
    return digest_of_ranks(parameters, held, device)


def sharded_modules(causal: nn.Module) -> list[FSDPModule]:
    """Return the modules whose parameters are gathered as a group. The outermost module comes first."""
    return [module for module in causal.modules() if isinstance(module, FSDPModule)]


def check_sharded(
    model: ShardedStreamModel,
    config: FsdpBackendConfig,
    profile: DeviceProfile,
    path: str,
    *,
    replays: bool = False,
    balances: bool = False,
) -> None:
    """Check a model at start-up. This is a collective.

    With `probe: false`, the check only chooses how the model reads streams, and checks the routers.
    """
    half = config.computes_in == "bf16"
    # The probe does not call the whole model, so FSDP2 would not gather all weights.
    cast(FSDPModule, model.causal).unshard()
    try:
        # Compiling layers for the probe's own shapes and modes would take minutes.
        with torch.compiler.set_stance("force_eager"):
            if config.probe:
                check_exactness(model, profile, path, in_half_precision=half)
            else:
                choose_reading(model, profile, in_half_precision=half)
            check_routers(model, profile, path, replays=replays, balances=balances)
    finally:
        give_back(model.causal)
    if model.sharing is None:
        return
    if model.reading != "stream":
        raise ModelError(
            f"model.path: {path} ({type(model.causal).__name__}) reads a row for each sequence, so ranks cannot share "
            "a sequence. Set backend.context: 1."
        )
    if config.probe:
        with torch.compiler.set_stance("force_eager"), excited(model.head):
            check_sharing(model, profile, path, half_precision=half)
            give_back(model.causal)


def cast_parameters(causal: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters. Buffers keep their dtype, since rotary frequencies in bf16 would give other angles.

    Heads for values or scores stay in fp32, since differences of their results must be exact.
    """
    head = output_layer(causal)
    exact = head.weight.detach().clone() if isinstance(head, ScalarHead) else None
    buffers = [(module, dict(module._buffers)) for module in causal.modules()]
    nn.Module.to(causal, dtype=dtype)
    for module, own in buffers:
        module._buffers.update(own)
    if exact is not None:
        assert isinstance(head, ScalarHead)
        head.to(torch.float32)
        if not exact.is_meta:
            with torch.no_grad():
                head.weight.copy_(exact)


def give_back(causal: nn.Module) -> None:
    """Free gathered parameters after forward passes without a backward pass, so that the optimizer sees shards."""
    for module in sharded_modules(causal):
        module.reshard()
        state = module._get_fsdp_state()
        # FSDP2 remembers each forward pass until its backward pass. Here no backward pass follows.
        if hasattr(state._comm_ctx, "post_forward_order"):
            state._comm_ctx.post_forward_order.clear()
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._post_forward_indices.clear()


def model_tensors(causal: nn.Module) -> list[Tensor]:
    """Free gathered weights, and return shards and buffers."""
    give_back(causal)
    return [*causal.parameters(), *causal.buffers()]


@contextmanager
def gathered(causal: nn.Module, config: FsdpBackendConfig) -> Iterator[None]:
    """Give every rank a whole copy of all parameters while the context is open. This is a collective.

    The copy has the dtype of computations. Forward passes in the context need no communication, so each rank may run
    its own.
    """
    modules = sharded_modules(causal)
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        module.unshard()
    try:
        yield
    finally:
        for module in modules:
            module.set_reshard_after_forward(_reshards(module, causal, config), recurse=False)
            module.reshard()


def _reshards(module: nn.Module | FSDPModule, causal: nn.Module, config: FsdpBackendConfig) -> bool:
    """Return whether gathered weights are freed after the forward pass. The root group and the head keep theirs."""
    return config.reshard_after_forward and module is not causal and not isinstance(module, ScalarHead)
