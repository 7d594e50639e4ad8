"""Let a causal language model read token streams.

The decoder runs on all tokens. The output layer runs only at positions with loss, one chunk of positions at a time, so
the logits of all tokens never exist together. The policy and the reference are `StreamModel`s, and a critic is a
`ValueModel`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from transformers import PretrainedConfig, PreTrainedModel

from spurline.config.run_config import ModelConfig
from spurline.data.batch import ROUTED_EXPERTS
from spurline.errors import ModelError
from spurline.protocols.loss import ENTROPY, TokenLossInputs
from spurline_models.architecture import ScalarHead, decoder_layers, find_decoder, output_layer
from spurline_models.configs import num_checkpointed
from spurline_models.device_profile import DeviceProfile, attention_library
from spurline_models.experts.router_balance import StreamBalance
from spurline_models.experts.router_replay import ExpertLoads, ExpertRouting
from spurline_models.experts.routers import find_routers
from spurline_models.kernels import kernels_of
from spurline_models.streams.segment_attention import ATTENTION_NAME, padding_reason
from spurline_models.streams.token_logprobs import LogitReading, OutputLogits, TokenLogprobs
from spurline_models.streams.token_stream import Bucket, SegmentPlan, Send, TokenStream, cut_buckets

Reading = Literal["stream", "rows"]
"""How a decoder reads a stream. `stream` gives it all tokens in one row. `rows` gives it a padded row for each segment,
with the model's own attention. Models need `rows` if they mix tokens outside of attention (linear attention, state
spaces, convolutions), or if their attention cannot be replaced."""

_SLOTS_PER_PASS = {"cpu": 256, "cuda": 8192}
"""The measured number of padding tokens that cost as much time as one pass of a decoder, by type of device."""

_CHECKPOINT = "_gradient_checkpointing_func"
"""The attribute of transformers' layers that holds the function which checkpoints them."""

_DRAWS = re.compile(r"^(?!summary|classifier).*(dropout|pdrop|jitter)")
"""Names of config fields that are rates of dropout or jitter, except those of classification heads."""


class StreamModel:
    """A causal model with segment attention. `TokenLogprobs` describes `chunk_tokens` and `fused`."""

    reads_tokens = False
    """True if the result for a token is a score, which depends on the token itself, and not a logprob or value."""

    def __init__(self, causal: PreTrainedModel, chunk_tokens: int = 4096, fused: bool = False):
        self.causal = causal
        self.reading: Reading = "stream"
        """How the decoder reads a stream. The probe sets it."""
        self.replays = True
        """Whether routers take the experts that an engine chose. A model of its own has other experts."""
        causal.set_attn_implementation(ATTENTION_NAME)
        head = output_layer(causal)
        if head is None:
            raise ModelError(f"{type(causal).__name__} has no output embeddings. Choose a causal language model.")
        self.decoder = find_decoder(causal)
        self.head: nn.Module = head
        self.score = TokenLogprobs(OutputLogits(causal), chunk_tokens, fused)
        self._offloads = False
        taken = inspect.signature(self.decoder.forward).parameters
        self._takes_positions = "position_ids" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())

    def checkpoint_activations(self, options: dict[str, Any], share: float = 1.0) -> None:
        """Keep only the inputs of a share of the layers, the lowest ones, and recompute their other activations.

        `options` are keywords of torch's `checkpoint`.
        """
        # Version 5 of transformers renamed the method.
        enable: Any = getattr(self.causal, "activation_checkpointing_enable", None)
        (enable or self.causal.gradient_checkpointing_enable)(options)
        layers = decoder_layers(self.causal)
        for layer in layers[num_checkpointed(share, len(layers)) :]:
            vars(layer)["gradient_checkpointing"] = False

    def offload_activations(self) -> None:
        """Keep the inputs of layers on the host until the backward pass. Layers must be checkpointed."""
        self._offloads = True

    def compile(self) -> None:
        """Run each layer of the decoder through torch.compile. Attention stays outside of the compiled graphs."""
        for layer in decoder_layers(self.causal) or [self.decoder]:
            layer.compile(dynamic=True)
            if getattr(layer, "gradient_checkpointing", False):
                # A checkpoint whose function calls attention cannot be traced. So compile the function alone.
                vars(layer)[_CHECKPOINT] = partial(_checkpoint_compiled, getattr(layer, _CHECKPOINT))

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """Run layers uncompiled in the context. Generation would recompile them for single tokens."""
        compiled = self._compiled()
        calls = [layer._compiled_call_impl for layer in compiled]
        for layer in compiled:
            layer._compiled_call_impl = None
        try:
            yield
        finally:
            for layer, call in zip(compiled, calls, strict=True):
                layer._compiled_call_impl = call

    def _compiled(self) -> list[nn.Module]:
        # Backends may compile layers by themselves.
        return [module for module in self.causal.modules() if module._compiled_call_impl is not None]

    def read_as(self, reading: Reading) -> None:
        """Set `reading`, and the attention that this reading needs."""
        self.causal.set_attn_implementation(ATTENTION_NAME if reading == "stream" else library_attention(self.causal))
        self.reading = reading

    def facts(self, dtype: torch.dtype) -> dict[str, str]:
        """Return facts to show at the start of a run: that it reads rows, what fused kernels compute, dropout rates.

        On a GPU, `pads` says why attention is computed on padded rows. `dtype` is that of computations.
        """
        facts = {"reads": "a row for each sequence"} if self.reading == "rows" else {}
        kernels = ", ".join(filter(None, (kernels_of(self.causal), "logprobs" if self.score.fused else "")))
        libraries = {"kernels": kernels, "attention": attention_library()}
        facts |= {name: used for name, used in libraries.items() if used}
        config = self.causal.config.get_text_config()
        rates = dropout_rates(config)
        if rates:
            facts["draws"] = ", ".join(f"{name} {value:g}" for name, value in rates.items())
        weights = next(self.causal.parameters())
        if weights.is_cuda and self.reading == "stream":
            widths: set[Any] = {getattr(config, name, None) for name in ("qk_head_dim", "v_head_dim")} - {None}
            own = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            has_sinks = any(name.endswith(".sinks") for name, _ in self.causal.named_parameters())
            reason = padding_reason(
                weights.device, dtype, widths or {own}, has_sinks, rates.get("attention_dropout", 0)
            )
            if reason:
                facts["pads"] = reason
        return facts

    def counting_experts(self) -> AbstractContextManager[ExpertLoads]:
        """Count the tokens that each expert gets in the context. Compiled layers are not counted.

        An outer context does not count what an inner context counts.
        """
        if not self._has_routers or self._compiled():
            return nullcontext(ExpertLoads())
        return self.routing.watching("loads", ExpertLoads())

    @cached_property
    def _has_routers(self) -> bool:
        return bool(find_routers(self.causal))

    def balancing(self, stream: TokenStream) -> AbstractContextManager[StreamBalance]:
        """Sum the balance of this stream's sequences in the context. Raises ModelError if there are no routers."""
        return self.routing.watching("balance", StreamBalance(stream))

    @cached_property
    def routing(self) -> ExpertRouting:
        """The model's routers. Raises ModelError if none are found."""
        return ExpertRouting(self.causal)

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        plan: SegmentPlan,
        routed_experts: Tensor | None = None,
        num_fill: int = 0,
    ) -> Tensor:
        """Return the last hidden states [T, H] of a stream [1, T]. `TokenStream` describes the arguments."""
        if self.reading == "rows":
            return self._hidden_of_rows(input_ids[0], position_ids[0], plan, routed_experts, num_fill)
        return self._decoder_output(
            input_ids,
            position_ids,
            routed_experts,
            slice(num_fill, None),
            slice(num_fill, None),
            segment_plan=plan,
            # Layers other than attention use these names.
            cu_seq_lens_q=plan.cu_seqlens,
            cu_seq_lens_k=plan.cu_seqlens,
            max_length_q=plan.max_length,
            max_length_k=plan.max_length,
        ).squeeze(0)

    def _hidden_of_rows(
        self, input_ids: Tensor, position_ids: Tensor, plan: SegmentPlan, routed_experts: Tensor | None, num_fill: int
    ) -> Tensor:
        device = input_ids.device
        parts: list[Tensor] = []
        for bucket in self._row_passes(plan, device):
            # Routers do not count the fill at the beginning of the stream.
            fill = max(0, num_fill - bucket.start)
            experts = None if routed_experts is None else bucket.rows(bucket.of(routed_experts), -1).flatten(0, 1)
            # Padding continues the positions. Models may take a jump for a new segment.
            first = bucket.rows(bucket.of(position_ids))[:, :1]
            hidden = self._decoder_output(
                bucket.rows(bucket.of(input_ids)),
                first + torch.arange(bucket.length, device=device),
                experts,
                slice(fill, None) if bucket.slots is None else bucket.slots[fill:],
                slice(bucket.start + fill, bucket.start + bucket.tokens),
            )
            parts.append(bucket.flat(hidden))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _row_passes(self, plan: SegmentPlan, device: torch.device) -> Sequence[Bucket]:
        slots = _SLOTS_PER_PASS.get(device.type, 0)
        return cut_buckets(plan.lengths, slots, DeviceProfile(device).send, most_padding=1.0)

    def _decoder_output(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        routed_experts: Tensor | None,
        counted: slice | Tensor,
        stream_tokens: slice,
        **options: Any,
    ) -> Tensor:
        """Return [B, T, H]. `counted` selects all tokens but padding. In the stream, these are `stream_tokens`."""
        if routed_experts is not None or "routing" in self.__dict__:
            self.routing.counted, self.routing.stream_tokens = counted, stream_tokens
        if routed_experts is not None:
            options[ROUTED_EXPERTS] = routed_experts
        if self._takes_positions:
            options["position_ids"] = position_ids
        with save_on_cpu(pin_memory=True) if self._offloads else nullcontext():
            return self.decoder(input_ids=input_ids, use_cache=False, **options).last_hidden_state

    def states(self, stream: TokenStream) -> Tensor:
        """Return the hidden states [N, H] from which the stream's loss tokens are predicted."""
        return self._states(stream)

    def _states(self, stream: TokenStream) -> Tensor:
        experts = stream.routed_experts if self.replays else None
        hidden = self.hidden(stream.input_ids, stream.position_ids, stream.plan, experts, stream.num_fill)
        return hidden.index_select(0, stream.source)

    def loss_inputs(
        self, stream: TokenStream, needs: Collection[str], temperature: float = 1.0, reading: LogitReading | None = None
    ) -> TokenLossInputs:
        """Return the inputs of a loss with these `needs` for the stream. `reading` is for a loss that reads logits."""
        hidden, wanted, columns = self._states(stream), ENTROPY in needs, stream.columns
        # No loss is computed on an idle stream, whose columns have no values.
        if reading is None or stream.is_idle:
            logprobs, entropy = self.score(hidden, stream.targets, wanted, temperature, stream.support)
        else:
            logprobs, entropy, values = self.score.read(hidden, stream, reading, wanted, temperature)
            columns = {**columns, **values}
        return TokenLossInputs(logprobs, stream.segment_index, stream.plan.num_segments, columns, entropy)


class ValueModel(StreamModel):
    """A decoder with a value head, which `put_value_head` has put on it.

    In its loss inputs, `logprobs` has values. The value of a token is the expected return before the token is chosen.
    """

    def loss_inputs(
        self, stream: TokenStream, needs: Collection[str], temperature: float = 1.0, reading: LogitReading | None = None
    ) -> TokenLossInputs:
        """Return the inputs of a critic's loss, without temperature and entropy.

        The critic's routers always choose experts themselves, since no engine has run the critic.
        """
        if reading is not None:
            raise no_logits()
        hidden = self.hidden(stream.input_ids, stream.position_ids, stream.plan, num_fill=stream.num_fill)
        hidden = hidden.index_select(0, stream.source)
        values = self.head(hidden)
        return TokenLossInputs(values, stream.segment_index, stream.plan.num_segments, stream.columns)


class ScoreModel(ValueModel):
    """A decoder with a score head. In its loss inputs, `logprobs` has the score after each token."""

    reads_tokens = True


def dropout_rates(config: PretrainedConfig) -> dict[str, float]:
    """Return the rates of dropout and jitter of a model that are not 0, by name."""
    found = config.get_text_config().to_dict().items()
    return {name: value for name, value in found if isinstance(value, float) and value > 0 and _DRAWS.search(name)}


def no_logits() -> ModelError:
    """Return the error for a loss that reads logits of a model with another head."""
    return ModelError("The loss reads logits, and a model with a value head has none. Choose another loss.")


@contextmanager
def excited(head: nn.Module | None) -> Iterator[None]:
    """Give a scalar head other weights in the context. A head of zeros would hide every difference from a probe."""
    if not isinstance(head, ScalarHead):
        yield
        return
    values = head.weight.detach()
    # Ranks hold shards.
    values = values.to_local() if isinstance(values, DTensor) else values
    before = values.clone()
    values.copy_(torch.arange(values.numel(), device=values.device).add_(1).float().sin_().view_as(values))
    try:
        yield
    finally:
        values.copy_(before)


def stream_model(
    model: ModelConfig, causal: PreTrainedModel, chunk_tokens: int = 4096, fused: bool = False
) -> StreamModel:
    """Return the stream model of a policy or an untrained model, for the head that it has."""
    kind = ScoreModel if model.head == "score" else StreamModel
    return kind(causal, chunk_tokens, fused)


def put_value_head(causal: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Replace the output layer by a value head. By default it has the model's dtype."""
    with torch.device(causal.device):
        head = ScalarHead(causal.config.get_text_config().hidden_size)
    causal.set_output_embeddings(head.to(dtype or causal.dtype))


@torch.compiler.disable
def _checkpoint_compiled(checkpoint: Callable[..., Any], call: partial[Any], *inputs: Any) -> Any:
    return checkpoint(partial(_compiled(call.func), *call.args, **call.keywords), *inputs)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


@contextmanager
def other_attention(causal: PreTrainedModel, name: str) -> Iterator[None]:
    """Use the attention that has this name in transformers, in the context."""
    before: Any = causal.config._attn_implementation
    causal.set_attn_implementation(name)
    try:
        yield
    finally:
        causal.set_attn_implementation(before)


def library_attention(causal: PreTrainedModel) -> str:
    """Return the name of the fastest attention of transformers that the model supports."""
    supports: Any = causal
    return "sdpa" if supports._supports_sdpa else "eager"


@contextmanager
def evaluation_mode(causal: nn.Module) -> Iterator[None]:
    """Compute without dropout and gradients in the context.

    In torch's inference mode instead, models would cache tables (rotary frequencies) that training cannot use.
    """
    was_training = causal.training
    causal.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        causal.train(was_training)


def idle_pass(after: int, send: Send) -> Bucket:
    """Return a dummy pass over one row of two padding tokens, after a stream of `after` tokens."""
    return Bucket(1, 2, 0, send(torch.zeros(0, dtype=torch.int64)), after)
