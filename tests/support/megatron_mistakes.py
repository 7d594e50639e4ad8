"""Ranks of the Megatron backend that fail, or that have one mistake of those that leave the loss of a step right.

Each function is a worker of `MegatronBackend`: it opens a rank in its process, and changes the code there. They are in
one module, since ranks of each module are forked from a process of their own.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

from failing_losses import fail

from spurline_megatron_backend.open_rank import open_rank
from spurline_ranks.group import Place

RUNS_THAT_GO_WELL = 2
"""Of all its micro-batches, forward or forward and backward."""

SMALL_BUCKET = 2_000
"""Values of a bucket, after which another begins; a tiny model has some ten times as many."""

Change = Callable[[Place], None]


def _mutant(change: Change) -> Callable[..., Any]:
    @functools.wraps(change)
    def worker(place: Place, plain_run: Mapping[str, Any], total_updates: int) -> Any:
        opened = open_rank(place, plain_run, total_updates)
        change(place)
        return opened

    return worker


@_mutant
def nothing_is_wrong(place: Place) -> None:
    """What the other workers are compared with."""


@_mutant
def nothing_is_wrong_with_small_buckets(place: Place) -> None:
    """Gradients are summed in many exchanges, most of which begin before the backward pass has ended."""
    from spurline_megatron_backend import trained_model

    settings = trained_model.DistributedDataParallelConfig
    small: Any = functools.partial(settings, bucket_size=SMALL_BUCKET)
    trained_model.DistributedDataParallelConfig = small
    shards = trained_model._shards

    def counted(wrapped: Any, known: Any) -> Any:
        if place.rank == 0:
            # Later stages have one bucket.
            assert sum(len(buffer.buckets) for buffer in wrapped.buffers) > 2
        return shards(wrapped, known)

    trained_model._shards = counted


@_mutant
def gradients_below_the_output_layer_are_summed_over_tensor_ranks(place: Place) -> None:
    """Each of them computes the whole of these gradients, so everything below is multiplied by their number."""
    from spurline_megatron_backend import gpt

    gather: Any = gpt.gather_from_sequence_parallel_region
    gpt.gather_from_sequence_parallel_region = lambda hidden, **_: gather(hidden, tensor_parallel_output_grad=True)


@_mutant
def losses_are_divided_by_the_micro_batches(place: Place) -> None:
    """As Megatron does where its loss is a mean, and gradients of data-parallel ranks are averaged too."""
    from spurline_megatron_backend import model_building

    transformer_config: Any = model_building.transformer_config

    def averaging(*arguments: Any) -> Any:
        config = transformer_config(*arguments)
        config.calculate_per_token_loss = False
        return config

    model_building.transformer_config = averaging


@_mutant
def norms_are_not_summed_over_tensor_ranks(place: Place) -> None:
    """Each rank keeps the gradient that its own tokens give."""
    from spurline_megatron_backend.model_building import SharedNorm

    make = SharedNorm.__init__

    def unmarked(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        self.weight.sequence_parallel = False

    SharedNorm.__init__ = unmarked


@_mutant
def parameters_of_several_ranks_count_more_than_once(place: Place) -> None:
    """Norms that tensor ranks share, and the output layer that is the embedding of another stage."""
    from spurline_megatron_backend.trained_model import TrainedModel

    TrainedModel._counts = lambda self, shard: True


@_mutant
def tied_weights_of_two_stages_keep_gradients_of_their_own(place: Place) -> None:
    """The embedding lacks what the output layer gives."""
    # A function of the package has the name of the module.
    finalize_model_grads = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalize_model_grads._allreduce_word_embedding_grads = lambda *arguments, **named: None


@_mutant
def the_first_stage_loses_its_gradients(place: Place) -> None:
    """They are 0, as if no gradient had come from the stage behind."""
    from spurline_megatron_backend.stages import StagedModel

    run = StagedModel.run

    def losing(self: StagedModel, *arguments: Any, **named: Any) -> None:
        run(self, *arguments, **named)
        if named["backward"]:
            for part in self.runs:
                part.zero_grad_buffer()

    if place.rank == 0:
        StagedModel.run = losing


@_mutant
def fails(place: Place) -> None:
    """In an update, where the other ranks go on until they wait for it. The environment variable `FAILING_RANK` says
    which rank and how: `1:kill`."""
    from spurline_megatron_backend.stages import StagedModel

    number, how = os.environ["FAILING_RANK"].split(":")
    run, calls = StagedModel.run, 0

    def failing(self: StagedModel, *arguments: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > RUNS_THAT_GO_WELL:
            fail(how)
        run(self, *arguments, **named)

    if place.rank == int(number):
        StagedModel.run = failing
