"""Kind `rollout_engine`: generate tokens from the current weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from spurline.config.run_config import RunConfig
    from spurline.protocols.backend import Backend
    from spurline.rl.trajectory import FinishReason


class RolloutEngineConfig(ComponentConfig):
    """Settings of a rollout engine."""

    kind: ClassVar[str] = "rollout_engine"
    borrows_model: ClassVar[bool] = False
    """Whether its `share` takes the model itself from the backend, which must then be one that `LendsModel`."""
    holds_copy: ClassVar[bool] = False
    """Whether it can generate with a copy in this process too, and takes tensors for it (transport `in_process`)."""

    @property
    def num_engines(self) -> int:
        """Engines that requests are spread over."""
        return 1

    @property
    def context_tokens(self) -> int | None:
        """Tokens that its own settings allow prompt and response together; None where the model alone sets a limit."""
        return None

    def estimate_memory(self, run: RunConfig, responses: int, length: int) -> dict[str, int]:
        """Bytes by part on the trainer's device while so many responses of this length, prompts included, are written.

        {} for an engine that generates elsewhere, or where it is not known.
        """
        return {}

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        """Sentences for `spurline plan`: where it generates, and what memory it takes there, responses as above."""
        return ()


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    temperature: 0 is greedy. top_p: 1.0 keeps all tokens. top_k: 0 keeps all tokens.
    max_new_tokens: longest response, end token included.
    stop_token_ids: besides the model's own end tokens; they end the response and belong to it.
    stop: texts that end the response; the tokens up to the one that completes a text belong to it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation to generate.

    seed: derived from (run, epoch, uid, sample, turn); the same request and weights give the same tokens.
    name: who asks, for messages: `train:17@40 sample 3 turn 0`.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    name: str


@dataclass(frozen=True)
class GenerationResult:
    """What was generated.

    token_ids: int32 [A], the end token included.
    logprobs: float32 [A], of the distribution sampled from (after temperature, top-p and top-k).
    raw_logprobs: float32 [A], of the model's own distribution (temperature 1, all tokens); None from an engine that
    does not know them.
    versions: int32 [A], the version of the weights each token came from.
    finish_reason: `stop` at an end token or stop text, `length` at the limit of tokens or context.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    raw_logprobs: NDArray[np.float32] | None
    versions: NDArray[np.int32]
    finish_reason: FinishReason


class RolloutEngine(Protocol):
    """Generate continuations.

    Factory: `Class(config, run=RunConfig, tokenizer=PreTrainedTokenizerBase)`. Every method has a time limit and says
    what it waited for. The coroutines of one engine are awaited on one event loop.
    """

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """One continuation; concurrent calls are batched.

        Raises DataError when the prompt leaves no room in the model's context, RunFailedError when the engine died.
        """
        ...

    async def pause(self) -> None:
        """Stop between two tokens; requests in flight wait."""
        ...

    async def resume(self) -> None:
        """Go on with the current weights."""
        ...

    async def close(self) -> None:
        """End the engine and its processes; requests in flight fail with RunFailedError."""
        ...


@runtime_checkable
class SharesWeights(Protocol):
    """An engine that can generate with the very weights a backend in this process trains."""

    def share(self, backend: Backend) -> None:
        """Generate with the backend's weights from now on. Raises ConfigError when the backend does not lend them."""
        ...

    def set_version(self, version: int) -> None:
        """The weights have been updated; tokens generated from now on carry this version."""
        ...


@runtime_checkable
class MayBeDown(Protocol):
    """An engine that there may be none of for a while, such as while one that died is started again."""

    def seconds_down(self) -> float:
        """Seconds so far in which no engine could generate; they do not count against the time limit of an attempt."""
        ...


@dataclass(frozen=True)
class TensorPlace:
    """A tensor within what a transport carries.

    name: hf_name. dtype: as torch writes it, without `torch.`: `float32`. shape: of the tensor.
    offset: bytes from the beginning of the bucket's memory or file; 0 where the transport has neither.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, name: str, tensor: Tensor, offset: int = 0) -> TensorPlace:
        """The place of this tensor."""
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), offset)


@dataclass(frozen=True)
class WeightBucket:
    """Some of a model's weights on their way to an engine; a tensor is never divided between buckets.

    transport: the way they take, such as `shared_memory`; says how to read `where`.
    places: what is in it. where: JSON-able, such as `{"path": "..."}`.
    tensors: the tensors themselves, in the order of `places`, for transports within this process; else empty.
    machine: the one whose processes alone can read it, as `spurline.ranks.machine.this_machine` names it; empty when
    others can too.
    """

    transport: str
    places: tuple[TensorPlace, ...]
    where: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tensors: tuple[Tensor, ...] = ()
    machine: str = ""

    def to_plain(self) -> dict[str, Any]:
        """The bucket as JSON can hold it; tensors of a transport within one process do not travel."""
        places = [[place.name, place.dtype, list(place.shape), place.offset] for place in self.places]
        return {"transport": self.transport, "places": places, "where": dict(self.where), "machine": self.machine}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> WeightBucket:
        """The bucket that `to_plain` wrote."""
        places = tuple(TensorPlace(name, dtype, tuple(shape), offset) for name, dtype, shape, offset in plain["places"])
        return cls(plain["transport"], places, plain["where"], machine=plain["machine"])


class TakesWeights(ABC):
    """Base of an engine with weights of its own, which a `weight_sync` replaces between two tokens.

    `begin_update`, then `load_bucket` until every weight has come, then `finish_update`; one update at a time. A
    failure on the way raises RunFailedError and leaves an engine that generates no further token.

    What has a default here is for an engine that takes long to start, consists of several, or starts some anew.

    transports: those whose buckets it reads, the best one first.
    num_workers: processes that hold weights: those that a transport with a group of ranks has to reach.
    engines_started: members started so far; when it has risen, some of the workers are others than before.
    longest_start_s: seconds that `start` and `wait_for_one` may take by the engine's own limits.
    on_awaiting_weights: called on the event loop when a member has been started and awaits weights; then look at
    `awaiting_weights`, and publish to them from the thread that owns the backend.
    """

    transports: Sequence[str]
    num_workers: int = 1
    engines_started: int = 0
    longest_start_s: float = 0.0
    on_awaiting_weights: Callable[[], None] | None = None

    @property
    def awaiting_weights(self) -> Sequence[TakesWeights]:
        """Members that generate nothing until they alone, or all, get weights. May be read on any thread."""
        return ()

    def holder_of(self, name: str) -> str | None:
        """Who has the request of this name; None while it waits for a member. May be called on any thread."""
        return "the engine"

    async def start(self) -> None:
        """Return when it could take weights, as could all its members; without this it starts with the first use."""
        return

    async def wait_for_one(self) -> None:
        """Return when it, or at least one of its members, could take weights."""
        return

    @abstractmethod
    async def begin_update(self, version: int) -> None:
        """Stop between two tokens; requests in flight wait."""

    @abstractmethod
    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Take these weights over. When it returns, the transport may use the bucket's memory for the next one."""

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Go on with the new weights; tokens generated from now on carry this version.

        Nothing computed with the old weights is used any more: keys and values of requests in flight are computed anew,
        unless the engine's config says otherwise. Raises RunFailedError when weights are missing.
        """
