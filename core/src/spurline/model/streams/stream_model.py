"""A causal language model that reads token streams: decoder, then logprobs where there is loss.

Place on the way: `TokenStream` -> `StreamModel` -> `TokenLossInputs` -> loss. The output layer runs only where there is
loss, a chunk of positions at a time, so at no time do logits of all tokens exist. The trained model and a frozen
reference are two of these; a critic is a `ValueModel`. It owns no optimizer and no loop.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from spurline.data.batch import ROUTED_EXPERTS
from spurline.errors import ModelError
from spurline.model.architecture import decoder_layers
from spurline.model.device_profile import DeviceProfile, slots_per_pass
from spurline.model.experts.expert_loads import ExpertLoads
from spurline.model.experts.router_balance import StreamBalance
from spurline.model.experts.router_replay import ExpertRouting
from spurline.model.experts.routers import find_routers
from spurline.model.holding.activation_offloading import ActivationOffloading
from spurline.model.kernels import kernels_of
from spurline.model.streams.row_passes import RowPass, row_passes
from spurline.model.streams.segment_attention import ATTENTION_NAME
from spurline.model.streams.token_stream import SegmentPlan, TokenStream
from spurline.protocols.loss import TokenLossInputs

ENTROPY = "entropy"

Reading = Literal["stream", "rows", "plain_rows"]
"""How a decoder reads a stream: as it is; as rows of one segment each, for one that mixes tokens outside of attention;
or as such rows with attention of its own, for one whose attention cannot be replaced."""

_READ_AS: dict[Reading, str] = {
    "rows": "a row for each sequence",
    "plain_rows": "a row for each sequence, with attention of its own",
}

_DRAWS = re.compile(r"^(?!summary|classifier).*(dropout|pdrop|jitter)")
"""Names of config fields by which models ask for randomness in training, other heads' not."""


class StreamModel:
    """`causal`, with the attention that keeps segments apart. chunk_tokens: positions whose logits exist together."""

    def __init__(self, causal: PreTrainedModel, chunk_tokens: int = 4096):
        self.causal = causal
        self._reading: Reading = "stream"
        causal.set_attn_implementation(ATTENTION_NAME)
        head = causal.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(causal).__name__} has no output embeddings. Choose a causal language model.")
        self.decoder = find_decoder(causal)
        self.head: nn.Module = head
        self.score = TokenLogprobs(OutputLogits(causal), chunk_tokens)
        self._offloading: ActivationOffloading | None = None
        taken = inspect.signature(self.decoder.forward).parameters
        self._takes_positions = "position_ids" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())

    def checkpoint_activations(self, options: dict[str, Any]) -> None:
        """Keep only the inputs of layers and recompute the rest in the backward pass.

        options: keywords of `torch.utils.checkpoint.checkpoint`.
        """
        # transformers renamed the method in the course of version 5.
        enable: Any = getattr(self.causal, "activation_checkpointing_enable", None)
        (enable or self.causal.gradient_checkpointing_enable)(options)

    def offload_activations(self, profile: DeviceProfile) -> None:
        """Keep what the backward pass needs of layers on the host; of `checkpoint_activations`, their inputs."""
        self._offloading = ActivationOffloading(self.causal, profile)

    def compile(self) -> None:
        """Run each layer of the decoder through torch.compile from now on; attention stays outside its graphs.

        Layers of one kind share what is compiled, for any number of tokens.
        """
        for layer in decoder_layers(self.causal) or [self.decoder]:
            layer.compile(dynamic=True)

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """A context for generation, whose caches and single tokens would be compiled anew."""
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
        # Asked of the modules: not every backend compiles by `compile`.
        return [module for module in self.causal.modules() if module._compiled_call_impl is not None]

    @property
    def reading(self) -> Reading:
        """How the decoder reads a stream; set by the probe of a model that cannot read it as it is."""
        return self._reading

    def read_as(self, reading: Reading) -> None:
        """Raises ModelError where the model's attention cannot be replaced, as `stream` and `rows` need."""
        own = library_attention(self.causal)
        self.causal.set_attn_implementation(own if reading == "plain_rows" else ATTENTION_NAME)
        self._reading = reading

    def facts(self) -> dict[str, str]:
        """For people: how it `reads` where that costs something, what fused `kernels` compute, and what it `draws` at
        random while it trains."""
        facts = {"reads": _READ_AS[self._reading]} if self._reading in _READ_AS else {}
        fused = kernels_of(self.causal)
        if fused:
            facts["kernels"] = fused
        config = self.causal.config.get_text_config()
        rates = {name: value for name, value in config.to_dict().items() if isinstance(value, float) and value > 0}
        drawn = [f"{name} {value:g}" for name, value in rates.items() if _DRAWS.search(name)]
        if drawn:
            facts["draws"] = ", ".join(drawn)
        return facts

    @contextmanager
    def counting_experts(self) -> Iterator[ExpertLoads]:
        """A context in which the tokens that each expert gets are counted; none of a model without experts, and none in
        compiled layers, which have no hooks."""
        loads = ExpertLoads()
        if not self._has_routers or self._compiled():
            yield loads
            return
        self.routing.loads = loads
        try:
            yield loads
        finally:
            self.routing.loads = None

    @cached_property
    def _has_routers(self) -> bool:
        return bool(find_routers(self.causal))

    @contextmanager
    def balancing(self, stream: TokenStream) -> Iterator[StreamBalance]:
        """A context in which the passes over this stream sum the balance of its sequences.

        Raises ModelError as `routing` does.
        """
        self.routing.balance = balance = StreamBalance(stream)
        try:
            yield balance
        finally:
            self.routing.balance = None

    @cached_property
    def routing(self) -> ExpertRouting:
        """The model's routers. Raises ModelError for a model without, or with unknown ones."""
        return ExpertRouting(self.causal)

    def hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        plan: SegmentPlan,
        routed_experts: Tensor | None = None,
        num_fill: int = 0,
    ) -> Tensor:
        """Last hidden states [T, H] of a stream [1, T]; fields as of `TokenStream`, whose experts are used again."""
        if routed_experts is not None:
            self.routing.check(routed_experts)
        if self.reading != "stream":
            return self._hidden_of_rows(input_ids[0], position_ids[0], plan, routed_experts, num_fill)
        return self._decoder_output(
            input_ids,
            position_ids,
            plan,
            routed_experts,
            slice(num_fill, None),
            slice(num_fill, None),
            # What packed models other than plain attention ask for, under the names of transformers.
            cu_seq_lens_q=plan.cu_seqlens,
            cu_seq_lens_k=plan.cu_seqlens,
            max_length_q=plan.max_length,
            max_length_k=plan.max_length,
        ).squeeze(0)

    def _hidden_of_rows(
        self, input_ids: Tensor, position_ids: Tensor, plan: SegmentPlan, routed_experts: Tensor | None, num_fill: int
    ) -> Tensor:
        if plan.exchange is not None:
            raise ModelError(
                f"{type(self.causal).__name__} mixes tokens outside of attention, so a sequence cannot be shared among "
                "ranks. Set backend.context: 1."
            )
        device = input_ids.device
        parts: list[Tensor] = []
        for row_pass in self._row_passes(plan, device):
            # Fill is not counted, and it lies in front of the stream.
            fill = max(0, num_fill - row_pass.tokens.start)
            real = row_pass.is_real
            experts = None if routed_experts is None else row_pass.rows(routed_experts, -1).flatten(0, 1)
            hidden = self._decoder_output(
                row_pass.rows(input_ids),
                row_pass.positions(position_ids),
                row_pass.plan,
                experts,
                slice(fill, None) if isinstance(real, slice) else real[fill:],
                slice(row_pass.tokens.start + fill, row_pass.tokens.stop),
            )
            parts.append(row_pass.stream(hidden))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _row_passes(self, plan: SegmentPlan, device: torch.device) -> Sequence[RowPass]:
        """The passes over a stream's rows."""
        return row_passes(plan, slots_per_pass(device), lambda tensor: tensor.to(device))

    def _decoder_output(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        plan: SegmentPlan,
        routed_experts: Tensor | None,
        counted: slice | Tensor,
        stream_tokens: slice,
        **options: Any,
    ) -> Tensor:
        """[B, T, H]. counted: which of the B * T tokens count for routers. stream_tokens: where these are in the
        stream."""
        if "routing" in self.__dict__:
            self.routing.counted, self.routing.stream_tokens = counted, stream_tokens
        if routed_experts is not None:
            options[ROUTED_EXPERTS] = routed_experts
        if self._takes_positions:
            options["position_ids"] = position_ids
        if self.reading != "plain_rows":
            options["segment_plan"] = plan
        with nullcontext() if self._offloading is None else self._offloading.of_pass():
            return self.decoder(input_ids=input_ids, use_cache=False, **options).last_hidden_state

    def loss_inputs(self, stream: TokenStream, needs: Collection[str], temperature: float = 1.0) -> TokenLossInputs:
        """What a loss with these `needs` sees of the stream."""
        hidden = self.hidden(stream.input_ids, stream.position_ids, stream.plan, stream.routed_experts, stream.num_fill)
        hidden = hidden.index_select(0, stream.source)
        logprobs, entropy = self.score(hidden, stream.targets, ENTROPY in needs, temperature)
        return TokenLossInputs(logprobs, stream.segment_index, stream.plan.num_segments, stream.columns, entropy)


class ValueModel(StreamModel):
    """The critic: the run's decoder, with a value head in the place of the output layer.

    The `logprobs` of its loss inputs are values: from the position before a token, the return expected from it on.
    """

    def __init__(self, causal: PreTrainedModel):
        if not isinstance(causal.get_output_embeddings(), ValueHead):
            put_value_head(causal)
        super().__init__(causal)

    def loss_inputs(self, stream: TokenStream, needs: Collection[str], temperature: float = 1.0) -> TokenLossInputs:
        """What a critic's loss with these `needs` sees of the stream; no logits, so no temperature and no entropy.

        The critic's routers choose for themselves: no engine has computed its weights.
        """
        hidden = self.hidden(stream.input_ids, stream.position_ids, stream.plan, num_fill=stream.num_fill)
        hidden = hidden.index_select(0, stream.source)
        values = self.head(hidden)
        return TokenLossInputs(values, stream.segment_index, stream.plan.num_segments, stream.columns)


class ValueHead(nn.Linear):
    """Hidden states [N, H] -> values [N]; 0 everywhere at first, so that the first advantages are sums of rewards."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False)

    def reset_parameters(self) -> None:
        """Draws nothing."""
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        # Not a matrix product, which autocast would round to half precision: values are subtracted from each other.
        return (hidden.to(self.weight.dtype) * self.weight).sum(-1)


def put_value_head(causal: PreTrainedModel, dtype: torch.dtype | None = None) -> None:
    """Replace the output layer by a value head, on the device of the model. dtype: None for the model's."""
    with torch.device(causal.device):
        head = ValueHead(causal.config.get_text_config().hidden_size)
    causal.set_output_embeddings(head.to(dtype or causal.dtype))


def find_decoder(causal: PreTrainedModel) -> nn.Module:
    """The part of the model that makes hidden states. Raises ModelError where there is none to be found."""
    decoder = causal.get_decoder()
    if decoder is not causal and isinstance(decoder, PreTrainedModel):
        return decoder
    # transformers looks for it by names, which not every model has, or has for something else.
    inner = [module for module in causal.children() if isinstance(module, PreTrainedModel)]
    if len(inner) != 1:
        raise ModelError(f"{type(causal).__name__} has no part that is a decoder. Choose a causal language model.")
    return inner[0]


class OutputLogits(nn.Module):
    """Hidden states [N, H] -> logits [N, vocabulary], as the model itself makes them.

    It runs the model's own forward function around hidden states that are there already: whatever a model does to
    logits after its output layer, such as a scale or a softcap, is done here too. It shares all modules with the model.
    """

    def __init__(self, causal: PreTrainedModel) -> None:
        super().__init__()
        self._given: list[Tensor] = []
        # A shallow copy: the model itself stays as it is. Not `copy`, for which classes of sharded modules have a way
        # of their own.
        self._around = object.__new__(type(causal))
        self._around.__dict__.update(vars(causal))
        self._around._modules = causal._modules | _given_states(causal, find_decoder(causal), self._given)

    def forward(self, hidden: Tensor) -> Tensor:
        around: Any = self._around
        # Beside the argument, which not every model hands on.
        self._given.append(hidden.unsqueeze(0))
        try:
            # Not by calling it: hooks of the whole model are not meant for a part of it.
            output = type(around).forward(around, inputs_embeds=self._given[-1], use_cache=False)
        finally:
            self._given.pop()
        return output.logits.squeeze(0)


def _given_states(module: nn.Module, decoder: nn.Module, given: list[Tensor]) -> dict[str, nn.Module]:
    """What takes the place of the child that is the decoder or holds it."""
    holders = ((name, child) for name, child in module.named_children() if any(m is decoder for m in child.modules()))
    return {name: _GivenStates(child, decoder, given) for name, child in holders}


class _GivenStates(nn.Module):
    """In the place of a decoder, or of a module that holds it beside towers that see or hear, whichever a model asks
    for hidden states. Its output is the last of the states that are given; its attributes are that module's."""

    def __init__(self, inner: nn.Module, decoder: nn.Module, given: list[Tensor]) -> None:
        super().__init__()
        # Not as modules of this one: whoever looks for dropout around the decoder must not find that inside.
        self.__dict__.update(_given_states(inner, decoder, given), _inner=inner, _given=given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPast:
        return _States(last_hidden_state=self.__dict__["_given"][-1])


class _States(BaseModelOutputWithPast):
    """Has no more than the hidden states, such as no logits of routers."""

    def __getattr__(self, name: str) -> None:
        return None


class TokenLogprobs:
    """The output layer of a model, applied in chunks of at most `chunk_tokens` positions.

    With several chunks their logits are recomputed in the backward pass.
    """

    def __init__(self, head: nn.Module, chunk_tokens: int):
        self._head = head
        self._chunk_tokens = chunk_tokens
        # Recomputing draws the same dropout only if the generator is rewound, which waits for the device; most heads
        # draw nothing.
        self._draws = any(isinstance(module, nn.Dropout) and module.p > 0 for module in head.modules())

    def __call__(
        self, hidden: Tensor, targets: Tensor, want_entropy: bool = False, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor | None]:
        """Logprob of each target [N] after each hidden state [N, H], and the entropy [N] there when asked for.

        Both are of softmax(logits / temperature).
        """
        num_chunks = math.ceil(len(targets) / self._chunk_tokens)
        if num_chunks <= 1:
            return self._score(hidden, targets, want_entropy, temperature)
        size = math.ceil(len(targets) / num_chunks)
        parts = [
            self._score_chunk(hidden_chunk, target_chunk, want_entropy, temperature)
            for hidden_chunk, target_chunk in zip(hidden.split(size), targets.split(size), strict=True)
        ]
        entropies = [entropy for _, entropy in parts if entropy is not None]
        return torch.cat([logprobs for logprobs, _ in parts]), torch.cat(entropies) if entropies else None

    def _score_chunk(
        self, hidden: Tensor, targets: Tensor, want_entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return self._score(hidden, targets, want_entropy, temperature)
        result = checkpoint(
            self._score, hidden, targets, want_entropy, temperature, use_reentrant=False, preserve_rng_state=self._draws
        )
        assert isinstance(result, tuple)
        return result

    def _score(
        self, hidden: Tensor, targets: Tensor, want_entropy: bool, temperature: float
    ) -> tuple[Tensor, Tensor | None]:
        logits = self._head(hidden)
        if logits.dtype in (torch.bfloat16, torch.float16):
            # Half-precision logits are exact enough, a softmax over 1e5 of them is not.
            logits = logits.float()
        if temperature != 1.0:
            logits = logits / temperature
        if not want_entropy:
            return -F.cross_entropy(logits, targets, reduction="none"), None
        all_logprobs = F.log_softmax(logits, dim=-1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1), entropy


@contextmanager
def other_attention(causal: PreTrainedModel, name: str) -> Iterator[None]:
    """Attention of transformers of this name in the place of that which the model has."""
    before: Any = causal.config._attn_implementation
    causal.set_attn_implementation(name)
    try:
        yield
    finally:
        causal.set_attn_implementation(before)


def library_attention(causal: PreTrainedModel) -> str:
    """Name of the fastest attention of transformers itself that the model has everywhere."""
    supports: Any = causal
    return "sdpa" if supports._supports_sdpa else "eager"


def vocabulary_size(causal: PreTrainedModel) -> int:
    """Tokens that the model can read and predict; models may round the tokenizer's vocabulary up."""
    weight = causal.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    # Some embeddings have further rows, of prompts that are no tokens (CPM-Ant).
    named = getattr(causal.config.get_text_config(), "vocab_size", None)
    return min(weight.shape[0], named) if isinstance(named, int) else weight.shape[0]


@contextmanager
def evaluation_mode(causal: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients. Not torch's inference mode: tables that models cache meanwhile, such as
    rotary frequencies, must stay usable in the next training step."""
    was_training = causal.training
    causal.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        causal.train(was_training)
