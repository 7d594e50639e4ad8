"""Check at start-up that a model on its ranks computes what it would compute of each sequence alone.

Three ways in which ranks save work are compared with the plain one on a few random tokens: several sequences in one
stream, a stream that ranks share, and logits in chunks. The probe runs forward passes of the trained model through all
stages, and changes nothing.
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
from spurline_models.probe import CHUNK_TOKENS, HALF_PRECISION_TOLERANCE, TOLERANCE, probe_sequences, probe_stream
from spurline_models.streams.token_stream import TokenStream
from spurline_ranks.sequence_sharing import SequenceSharing

_OTHER_LAYERS = "choose backend fsdp, which computes the model's own layers"
_FINDINGS = (
    ("when sequences are packed than separately", f"Its attention mixes tokens across sequences: {_OTHER_LAYERS}."),
    ("when ranks share a sequence than alone", f"Set backend.context: 1, or {_OTHER_LAYERS}."),
    ("when its logits are computed in chunks than at once", f"{_OTHER_LAYERS.capitalize()}."),
)
"""A difference as the end of a sentence, and its fix, in the order of the checks."""


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
    """Raise ModelError with the difference, its size and its fix: on all ranks or on none. A collective.

    In half precision the model has no exact forward pass, and small differences are allowed.
    """
    sequences = probe_sequences(architecture.vocabulary)
    packed = probe_stream(sequences, profile)
    alone = SequenceSharing(None, profile)

    def logprobs(streams: Sequence[TokenStream], sharing: SequenceSharing | None, chunk_tokens: int) -> list[Tensor]:
        with model.computing_otherwise(sharing=sharing, chunk_tokens=chunk_tokens):
            return _logprobs(model, streams, grid, doing)

    whole = packed.num_tokens
    with model.evaluating():
        together, *separate = logprobs([packed, *(probe_stream([one], profile) for one in sequences)], alone, whole)
        shared = logprobs([packed], None, whole) if grid.context > 1 else [together]
        chunked = logprobs([packed], None, CHUNK_TOKENS)
    reference = torch.cat(separate)
    distances = [_distance(values, reference, half_precision) for values in (together, *shared, *chunked)]
    # Tells stages without logprobs.
    found = torch.stack(distances).to(profile.device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    allowed = HALF_PRECISION_TOLERANCE if half_precision else TOLERANCE
    for distance, (when, fix) in zip(found.tolist(), _FINDINGS, strict=True):
        if distance > allowed:
            raise ModelError(
                f"model.path: {path} ({architecture.model_type} of Megatron-core) gives other log-probabilities {when}:"
                f" {distance:.2g} standard deviations (allowed {allowed:g}). {fix}"
            )


def _logprobs(
    model: StagedModel, streams: Sequence[TokenStream], grid: Grid, doing: Callable[[str], None]
) -> list[Tensor]:
    """Return the logprobs of each stream on the last stage, and empty tensors on all others."""
    found = [torch.zeros(0) for _ in streams]

    def visit(rows: Rows, stream: TokenStream, inputs: TokenLossInputs) -> Tensor:
        found[int(rows[0])] = inputs.logprobs.float()
        return inputs.logprobs.sum()

    numbered = [(np.array([number]), stream) for number, stream in enumerate(streams)]
    # Interleaved stages take micro-batches in rounds of as many as there are stages.
    missing = grid.rounded_up(len(numbered)) - len(numbered)
    model.run([*numbered, *numbered[:1] * missing], visit, (), 1.0, doing=doing, backward=False)
    return found


def _distance(values: Tensor, reference: Tensor, half_precision: bool) -> Tensor:
    """Return the largest difference of a token, in standard deviations of the reference.

    In half precision it is the mean difference, since a router may choose another expert for a single token. The result
    is 0 on ranks without values, and infinite if it is not a number.
    """
    if not len(reference):
        return torch.zeros(())
    difference = (values - reference).abs()
    distance = difference.mean() if half_precision else difference.max()
    return (distance / reference.std().clamp_min(1e-30)).nan_to_num(nan=torch.inf, posinf=torch.inf)
