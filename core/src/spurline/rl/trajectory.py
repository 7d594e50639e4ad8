"""The records of reinforcement learning: what was asked, generated, and how it was rewarded.

Place on the way: environment -> Trajectory -> Group (with rewards) -> advantages -> rollouts collator -> TrainingBatch.
Plain data; no torch, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from spurline.arrays import as_array

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class Turn:
    """One call of the model: the tokens it saw and the tokens it wrote.

    prompt_ids: int32 [P], the whole context. response_ids: int32 [A], what the model produced, stop token included.
    Lists, arrays and tensors are accepted and converted once, here; tensors are detached and moved to the CPU.
    logprobs: float32 [A], of the distribution sampled from, or None.
    versions: int32 [A], weight version per token, or None.
    loss_mask: uint8 [A], 0 where a response token is not trained. rewards, advantages: float32 [A] or None.
    values, returns: float32 [A] or None; a critic's estimate before each token is written, and what it is trained on.
    routed_experts: int16 [P + A, layers, top_k] for mixture-of-experts replay, or None.
    """

    prompt_ids: NDArray[np.int32]
    response_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    logprobs: NDArray[np.float32] | None = None
    versions: NDArray[np.int32] | None = None
    rewards: NDArray[np.float32] | None = None
    advantages: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int16] | None = None
    finish_reason: FinishReason = "stop"

    def __post_init__(self) -> None:
        fields = self.__dict__
        for name, dtype in _DTYPES.items():
            values = fields[name]
            # Each stage makes the record anew, mostly from arrays that are right already: those must cost nothing.
            if values is None or (type(values) is np.ndarray and values.dtype is dtype):
                continue
            object.__setattr__(self, name, as_array(values, dtype))


_DTYPES: dict[str, np.dtype[Any]] = {
    "prompt_ids": np.dtype(np.int32),
    "response_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
    "rewards": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "values": np.dtype(np.float32),
    "returns": np.dtype(np.float32),
    "routed_experts": np.dtype(np.int16),
}


@dataclass(frozen=True)
class Trajectory:
    """One attempt at a prompt: its turns in order and its reward terms.

    uid: the prompt's uid. sample: which of the group's attempts this is, from 0.
    rewards: named terms, before weights. info: anything the environment wants to log.
    """

    uid: str
    sample: int
    turns: tuple[Turn, ...]
    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Group:
    """All attempts at one prompt. draw: position of the prompt in the endless data order."""

    uid: str
    draw: int
    trajectories: tuple[Trajectory, ...]
