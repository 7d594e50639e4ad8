"""Kind `rollout_engine`: generate tokens from the current weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from spurline.config.run_config import RunConfig
    from spurline.protocols.backend import Backend
    from spurline_models.weight_buckets import WeightBucket
    from spurline_rl.trajectory import FinishReason


class RolloutEngineConfig(ComponentConfig):
    """Settings of a rollout engine."""

    kind: ClassVar[str] = "rollout_engine"
    borrows_model: ClassVar[bool] = False
    """If true, `share` takes the model from the backend, which must be a `LendsModel`."""
    holds_copy: ClassVar[bool] = False
    """If true, it can also generate with a copy in this process, which takes tensors (transport `in_process`)."""
    takes_less: ClassVar[str] = ""
    """Advice on settings that leave the trainer more memory beside a colocated engine."""

    @property
    def notes_experts(self) -> bool:
        """Return whether its results have `routed_experts` if the source asks for router replay."""
        return False

    @property
    def is_colocated(self) -> bool:
        """Return whether its engines take turns with the backend on the same devices. Each must be a `MaySleep`."""
        return False

    @property
    def offloads_trainer(self) -> bool:
        """Return whether the backend's weights also leave the devices while colocated engines generate."""
        return False

    @property
    def update_limit_s(self) -> float | None:
        """Return the seconds after which an engine that takes a bucket of weights is ended; None for no limit."""
        return None

    @property
    def start_limit_s(self) -> float | None:
        """Return the seconds that its engines may take to start; None if they start at once."""
        return None

    @property
    def num_engines(self) -> int:
        """Return the number of engines that share the requests."""
        return 1

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it may run on another machine."""
        return False

    @property
    def context_tokens(self) -> int | None:
        """Return the largest number of tokens of prompt and response; None if the model sets it."""
        return None

    def estimate_memory(self, run: RunConfig, responses: int, length: int) -> dict[str, int]:
        """Return bytes by part on the trainer's device while it generates; {} if it is on other devices or unknown.

        Args:
            run: The config of the run.
            responses: Responses generated at the same time.
            length: Tokens of each, with its prompt.
        """
        return {}

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> dict[EngineMemory, int]:
        """Return bytes on the fullest device of a colocated engine that is awake; {} if they are unknown."""
        return {}

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        """Return sentences for `spurline plan` about its place and memory."""
        return ()


EngineMemory = Literal["weights", "cache"]
"""Parts of an engine's memory on its device: the weights, and the keys and values of requests."""


@dataclass(frozen=True)
class Sampling:
    """How to sample.

    Attributes:
        temperature: 0 is greedy.
        top_p: 1.0 keeps all tokens.
        top_k: 0 keeps all tokens.
        max_new_tokens: Longest response, end token included.
        stop_token_ids: Further end tokens. An end token belongs to the response.
        stop: Texts that end the response. The token that completes a text belongs to the response.
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

    Attributes:
        seed: Derived from (run, epoch, uid, sample, turn). The same request and weights give the same tokens.
        name: Name in messages, such as `train:17@40 sample 3 turn 0`.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    name: str


@dataclass(frozen=True)
class GenerationResult:
    """The result of one request.

    Attributes:
        token_ids: int32 [A], the end token included.
        logprobs: float32 [A], of the distribution sampled from (after temperature, top-p and top-k).
        raw_logprobs: float32 [A], of the model's own distribution (temperature 1, all tokens), or None.
        versions: int32 [A], the version of the weights of each token.
        finish_reason: `stop` at an end token or stop text, `length` at the limit of tokens or context.
        routed_experts: int16 [P + A, layers, top_k], the experts of each token when it was first computed; -1 for a
            token that was not computed, such as the last one. None unless the engine was asked for them.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    raw_logprobs: NDArray[np.float32] | None
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    routed_experts: NDArray[np.int16] | None = None


class RolloutEngine(Protocol):
    """Generate continuations.

    Factory: `Class(config, run=RunConfig, tokenizer=PreTrainedTokenizerBase)`. Every method has a time limit, and its
    error says for what it waited. The coroutines of one engine are awaited on one event loop.
    """

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        """Generate one continuation; concurrent calls are batched.

        Raises:
            DataError: If the prompt fills the model's context.
            RunFailedError: If the engine died.
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
    """An engine that can generate with the weights that a backend in this process trains."""

    def share(self, backend: Backend) -> None:
        """Generate with the backend's weights from now on. Raises ConfigError when the backend does not lend them."""
        ...

    def set_version(self, version: int) -> None:
        """Mark tokens from now on with this version: the weights have been updated."""
        ...


@runtime_checkable
class MaySleep(Protocol):
    """An engine that can give the memory of its device to others between two tokens.

    Between `sleep` and the last `wake` it generates nothing. Requests in flight wait. Afterwards their keys and values
    are computed again, and they go on. After a RunFailedError the engine generates nothing more.
    """

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the device's memory between two tokens.

        Args:
            keep_weights: Keep the weights in the host's memory until `wake`. Otherwise an update must bring all.
        """
        ...

    async def wake(self, part: EngineMemory) -> None:
        """Take the memory of one part, first `weights`, then `cache`. Weights may be updated in between."""
        ...


@runtime_checkable
class MayBeDown(Protocol):
    """An engine that may be unable to generate for a while, for example while its process starts again."""

    def seconds_down(self) -> float:
        """Return the total seconds in which it could not generate. Time limits of attempts do not count them."""
        ...


class TakesWeights(ABC):
    """Base of an engine with its own weights, which a `weight_sync` replaces between two tokens.

    An update is `begin_update`, then `load_bucket` until every weight has come, then `finish_update`. Updates do not
    overlap. After a RunFailedError the engine generates no further token. Members with a default are for engines that
    take long to start, or that consist of several engines.

    Attributes:
        transports: Transports whose buckets it reads, the best one first.
        takes_adapters: Whether `begin_adapter_update` works, so that adapters can be sent without the model.
        longest_start_s: Seconds after which `start` and `wait_for_one` fail.
        on_awaiting_weights: Called on the event loop when a member has started and awaits weights. The thread that owns
            the backend then publishes to `awaiting_weights`.
    """

    transports: Sequence[str]
    takes_adapters: bool = False
    longest_start_s: float = 0.0
    on_awaiting_weights: Callable[[], None] | None = None

    @property
    def awaiting_weights(self) -> Sequence[TakesWeights]:
        """Return the members that wait for weights. May be read on any thread."""
        return ()

    @property
    def weights_dtype(self) -> str | None:
        """Return the dtype of its weights after the start, such as `bfloat16`; None if it takes any."""
        return None

    @property
    def receivers(self) -> Mapping[str, int]:
        """Return the members that take the present update: their names, and how many processes hold their weights.

        A member that is started again has another name. After a `BucketLostError` of some members the others remain.
        """
        return {"the engine": 1}

    def holder_of(self, name: str) -> str | None:
        """Return the member that has this request; None if it still waits. May be called on any thread."""
        return "the engine"

    async def start(self) -> None:
        """Return when all members can take weights. If it is not called, the engine starts with its first use."""
        return

    async def wait_for_one(self) -> None:
        """Return when at least one member can take weights."""
        return

    @abstractmethod
    async def begin_update(self, version: int) -> None:
        """Stop between two tokens; requests in flight wait."""

    async def begin_adapter_update(self, version: int, adapter: Mapping[str, Any]) -> None:
        """Begin an update of an adapter, on the weights with which the engine was started.

        It is called if `takes_adapters`. Tensors have their names in `adapter_model.safetensors`.

        Args:
            version: The new version.
            adapter: The settings of the adapter, as PEFT writes them to `adapter_config.json`.
        """
        raise NotImplementedError

    @abstractmethod
    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Take these weights. Afterwards the transport may use the bucket's memory for the next one.

        Raises:
            BucketLostError: If the bucket did not arrive. It may be sent again.
        """

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Go on with the new weights. Tokens generated from now on have this version.

        Keys and values of requests in flight are computed again, unless the engine's config says otherwise.

        Raises:
            RunFailedError: If weights are missing.
        """
