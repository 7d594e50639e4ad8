"""Check at start-up that packing and sharing do not change the log-probabilities of a sequence.

Ranks pack several sequences in one stream, share a stream, and compute logits in chunks. The probe does this for a few
random tokens, and compares the logprobs with the logprobs of each sequence alone. It runs forward passes through all
stages, and does not change the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from spurline.errors import ModelError
from spurline.protocols.loss import TokenLossInputs
from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.stages import StagedModel
from spurline_models.dealing import Rows
from spurline_models.device_profile import DeviceProfile
from spurline_models.probe import CHUNK_TOKENS, distance, probe_sequences, probe_stream, rounded_layers
from spurline_models.streams.token_stream import TokenStream
from spurline_ranks.sequence_sharing import SequenceSharing


def check_exactness(
    model: StagedModel,
    architecture: Architecture,
    grid: Grid,
    profile: DeviceProfile,
    path: str,
    *,
    half_precision: bool,
    doing: Callable[[str], None],
) -> None:
    """Raise ModelError on all ranks if log-probabilities change. This is a collective.

    In half precision small differences are allowed.
    """
    sequences = probe_sequences(architecture.vocabulary)
    packed = probe_stream(sequences, profile)
    separate = [probe_stream([one], profile) for one in sequences]
    alone = SequenceSharing(None, profile)
    with model.computing_otherwise(sharing=None, chunk_tokens=CHUNK_TOKENS):
        [found] = _logprobs(model, [packed], grid, doing)
    with model.computing_otherwise(sharing=alone, chunk_tokens=packed.num_tokens):
        expected = torch.cat(_logprobs(model, separate, grid, doing))
        rounded = None
        if half_precision:
            with rounded_layers(layer for part in model.parts for layer in part.decoder.layers):
                rounded = torch.cat(_logprobs(model, separate, grid, doing))
    # Only the last stage has logprobs, but all stages need the distance.
    jumps = architecture.num_experts > 0
    values = distance(found, expected, expected.std(), rounded, jumps=jumps) if len(expected) else (0.0, 0.0)
    compared = torch.tensor(values, device=profile.device).nan_to_num(nan=torch.inf)
    dist.all_reduce(compared, op=dist.ReduceOp.MAX)
    difference, allowed = compared.tolist()
    if difference > allowed:
        raise ModelError(
            f"model.path: {path} ({architecture.model_type} of Megatron-core) gives other log-probabilities when ranks "
            f"pack sequences, share them, and score in chunks. They differ by {difference:.2g} standard deviations "
            f"(allowed {allowed:.2g}). Choose backend fsdp, which computes the model's own layers."
        )


def _logprobs(
    model: StagedModel, streams: Sequence[TokenStream], grid: Grid, doing: Callable[[str], None]
) -> list[Tensor]:
    """Return the logprobs of each stream on the last stage. Other stages return empty tensors."""
    found = [torch.zeros(0) for _ in streams]

    def visit(rows: Rows, stream: TokenStream, inputs: TokenLossInputs) -> Tensor:
        found[int(rows[0])] = inputs.logprobs.float()
        return inputs.logprobs.sum()

    numbered = [(np.array([number]), stream) for number, stream in enumerate(streams)]
    # With virtual stages, the number of streams must be a multiple of the number of stages.
    missing = grid.rounded_up(len(numbered)) - len(numbered)
    model.run([*numbered, *numbered[:1] * missing], visit, (), 1.0, doing=doing, backward=False)
    return found
