"""Run micro-batches through a model on the stages of a pipeline: only forward, or forward and backward.

Data flow: the token streams of this rank's rows -> Megatron-core's schedules, which send hidden states from
stage to stage -> `visit` with logprobs on the last stage. All ranks of a pipeline get the same rows, and make the same
exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from spurline.protocols.loss import ENTROPY, TokenLossInputs
from spurline_megatron_backend.core_attention import Rotary, packed_params
from spurline_megatron_backend.gpt import HiddenGPT
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.parts import HeldParameter, HeldParameters
from spurline_megatron_backend.router_replay import RouterChoice
from spurline_models.dealing import Rows
from spurline_models.experts.router_replay import ExpertLoads
from spurline_models.streams.stream_model import evaluation_mode, excited
from spurline_models.streams.token_logprobs import LogitReading, ReadStates
from spurline_models.streams.token_stream import TokenStream
from spurline_ranks.sequence_sharing import SequenceSharing

Visit = Callable[[Rows, TokenStream, TokenLossInputs], Tensor]
"""A function that the last stage calls with the logprobs of a micro-batch. It returns the scalar to differentiate."""


@dataclass(frozen=True)
class _MicroBatch:
    """A stream and this rank's part of it. Of the stream's positions with loss, `mine` selects those in this part."""

    rows: Rows
    stream: TokenStream
    part: TokenStream
    mine: slice


_Finish = Callable[[int, _MicroBatch, Tensor], Tensor]
"""A function that the last stage calls with the number of a micro-batch, the micro-batch, and its hidden states at
positions with loss. It returns the scalar to differentiate."""


class StagedModel:
    """The parts of a model that this rank holds, in order. `held` describes the parameters of each part."""

    def __init__(
        self,
        parts: Sequence[HiddenGPT],
        held: Sequence[HeldParameters],
        grid: Grid,
        sharing: SequenceSharing,
        rotary: Rotary,
        choices: Sequence[RouterChoice] = (),
        *,
        reads_tokens: bool = False,
    ) -> None:
        self.parts = list(parts)
        self._choices = choices
        self._reads_tokens = reads_tokens
        """Whether the model has a score head, which scores a token after reading it."""
        self._grid = grid
        self._sharing = sharing
        self._rotary = rotary
        self._held = held
        self.runs: Sequence[torch.nn.Module] = self.parts
        """The modules that the schedules call: the parts, or wrappers of the parts that sum gradients."""

    @property
    def config(self) -> TransformerConfig:
        return self.parts[0].config

    def parameters(self) -> list[tuple[HeldParameter, Parameter]]:
        pairs: list[tuple[HeldParameter, Parameter]] = []
        for part, held in zip(self.parts, self._held, strict=True):
            named = dict(part.named_parameters())
            assert named.keys() == held.keys(), (sorted(named.keys() ^ held.keys()), type(part))
            for name, parameter in named.items():
                assert tuple(parameter.shape) == held[name].shape, (name, parameter.shape, held[name].shape)
                pairs.append((held[name], parameter))
        return pairs

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in (*part.parameters(), *part.buffers())]

    def run(
        self,
        streams: Sequence[tuple[Rows, TokenStream]],
        visit: Visit,
        needs: Collection[str],
        temperature: float,
        *,
        doing: Callable[[str], None],
        backward: bool,
        whole_gradients: bool = False,
        readings: Sequence[LogitReading | None] = (),
    ) -> None:
        """Run all micro-batches forward and backward, or in evaluation mode only forward.

        After a backward pass, a rank holds the summed gradients of the values that it optimizes. With
        `whole_gradients`, it holds the summed gradients of all its parameters. If the loss reads logits, the last
        stage has a reading for each micro-batch.
        """

        def finish(number: int, microbatch: _MicroBatch, hidden: Tensor) -> Tensor:
            stream, part, mine = microbatch.stream, microbatch.part, microbatch.mine
            reading = readings[number] if readings else None
            values, entropy, made = self.parts[-1].scores(hidden, part, ENTROPY in needs, temperature, reading)
            join = partial(self._sharing.joined, mine=mine, stream=stream)
            entropy = None if entropy is None else join(entropy)
            columns = {**stream.columns, **{name: join(column) for name, column in made.items()}}
            inputs = TokenLossInputs(join(values), stream.segment_index, stream.plan.num_segments, columns, entropy)
            return visit(microbatch.rows, stream, inputs)

        self._run(streams, finish, doing=doing, backward=backward, whole_gradients=whole_gradients)

    def states(self, streams: Sequence[tuple[Rows, TokenStream]], doing: Callable[[str], None]) -> list[ReadStates]:
        """Return the hidden states of each micro-batch at positions with loss, on the last stage. Others return []."""
        found: list[ReadStates] = []
        layer = self.parts[-1].score

        def finish(number: int, microbatch: _MicroBatch, hidden: Tensor) -> Tensor:
            assert layer is not None, "a model with a value head has no logits"
            found.append(ReadStates(layer, hidden))
            return hidden.sum()

        self._run(streams, finish, doing=doing, backward=False)
        return found

    def _run(
        self,
        streams: Sequence[tuple[Rows, TokenStream]],
        finish: _Finish,
        *,
        doing: Callable[[str], None],
        backward: bool,
        whole_gradients: bool = False,
    ) -> None:
        if self._reads_tokens:
            streams = [(rows, stream.at_tokens()) for rows, stream in streams]
        unit = self._grid.tensor
        longest = 0
        if self._grid.virtual_stages > 1:
            longest = max(self._sharing.padded_length(stream.num_tokens, unit) for _, stream in streams)
        microbatches = [
            _MicroBatch(rows, stream, *self._sharing.part_of(stream, multiple=unit, at_least=longest))
            for rows, stream in streams
        ]
        count = len(microbatches) * len(self.parts)
        done = iter(range(1, count + 1))

        def step(
            iterator: Iterator[tuple[int, _MicroBatch]], run: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number, microbatch = next(iterator)
            doing(f"micro-batch {-(-next(done) // len(self.parts))} of {len(microbatches)}")
            packed = packed_params(microbatch.part, self._rotary)
            hidden = run(microbatch.part.input_ids, None, None, packed_seq_params=packed)

            def finished(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                """Return the scalar, a number of tokens and metrics, as schedules expect. The last two are not used."""
                scalar = finish(number, microbatch, hidden.squeeze(1).index_select(0, microbatch.part.source))
                return scalar, torch.ones((), dtype=torch.int, device=scalar.device), {}

            return hidden, finished

        if backward:
            for part in self.runs:
                # Gradient sums that begin in the last micro-batch read this attribute. Later ones get an argument.
                cast(Any, part).force_all_reduce = whole_gradients
        iterators: list[Iterator[Any]] = [enumerate(microbatches) for _ in self.parts]
        with torch.enable_grad() if backward else evaluation_mode(torch.nn.ModuleList(self.parts)):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=iterators if len(self.parts) > 1 else iterators[0],
                model=list(self.runs),
                num_microbatches=len(microbatches),
                # Virtual stages exchange tensors of this length. Megatron divides it by `context`.
                seq_length=microbatches[0].part.num_tokens * self._grid.context,
                micro_batch_size=1,
                forward_only=not backward,
                force_all_reduce=whole_gradients,
            )

    @contextmanager
    def counting_experts(self, loads: ExpertLoads) -> Iterator[None]:
        """While the context is open, add up the number of tokens that this rank sends to each expert."""
        for choice in self._choices:
            choice.loads = loads
        try:
            yield
        finally:
            for choice in self._choices:
                choice.loads = None

    def to(self, device: torch.device) -> None:
        """Move the weights of a model that is not trained."""
        for part in self.parts:
            part.to(device)

    @contextmanager
    def computing_otherwise(self, *, sharing: SequenceSharing | None, chunk_tokens: int) -> Iterator[None]:
        """Use this chunk size of logits while the context is open. If `sharing` is given, replace the sharing too."""
        own_sharing, score = self._sharing, self.parts[-1].score
        own_chunks = chunk_tokens if score is None else score.chunk_tokens
        self._sharing = sharing or own_sharing
        if score is not None:
            score.chunk_tokens = chunk_tokens
        try:
            with excited(getattr(self.parts[-1], "value_head", None)):
                yield
        finally:
            self._sharing = own_sharing
            if score is not None:
                score.chunk_tokens = own_chunks
