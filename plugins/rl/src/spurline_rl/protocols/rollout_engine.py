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
    """If true, its `share` takes the model from the backend, which must then be a `LendsModel`."""
    holds_copy: ClassVar[bool] = False
    """If true, it can also generate with a copy in this process, and takes tensors for it (transport `in_process`)."""
    takes_less: ClassVar[str] = ""
    """Advice on settings with which a colocated engine leaves the trainer more of the device."""

    @property
    def notes_experts(self) -> bool:
        """Return whether its results have `routed_experts` where the run's source asks for router replay."""
        return False

    @property
    def is_colocated(self) -> bool:
        """Return whether its engines, each a `MaySleep`, take turns with the backend on the same devices."""
        return False

    @property
    def offloads_trainer(self) -> bool:
        """Return whether the backend's weights also leave the devices while colocated engines generate."""
        return False

    @property
    def update_limit_s(self) -> float | None:
        """Return the seconds an engine may take for one bucket of weights before it is ended; None for no limit."""
        return None

    @property
    def start_limit_s(self) -> float | None:
        """Return the seconds its engines may take to start; None where they are there at once."""
        return None

    @property
    def num_engines(self) -> int:
        """Return how many engines requests are spread over."""
        return 1

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it may be on another machine than this process."""
        return False

    @property
    def context_tokens(self) -> int | None:
        """Return the limit of its own settings on prompt and response together; None where the model sets the limit."""
        return None

    def estimate_memory(self, run: RunConfig, responses: int, length: int) -> dict[str, int]:
        """Return bytes by part on the trainer's device while so many responses of this length are written.

        The length includes the prompt. {} for an engine that generates elsewhere, or where it is not known.
        """
        return {}

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> dict[EngineMemory, int]:
        """Return bytes on the fullest device of a colocated engine that is awake; {} where they are not known.

        Args:
            device_bytes: Memory of the device.
        """
        return {}

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        """Return sentences for `spurline plan`: where it generates, and how much memory it takes there."""
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
        stop: Texts that end the response. The token that completes a text belongs to it.
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
        seed: Derived from (run, epoch, uid, sample, turn); the same request and weights give the same tokens.
        name: Names the request in messages: `train:17@40 sample 3 turn 0`.
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
        versions: int32 [A], the version of the weights each token came from.
        finish_reason: `stop` at an end token or stop text, `length` at the limit of tokens or context.
        routed_experts: int16 [P + A, layers, top_k], the experts that were chosen when each token was first computed;
            -1 for a token that was not, such as the last one. None from an engine that was not asked for them.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    raw_logprobs: NDArray[np.float32] | None
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    routed_experts: NDArray[np.int16] | None = None


class RolloutEngine(Protocol):
    """Generate continuations.

    Factory: `Class(config, run=RunConfig, tokenizer=PreTrainedTokenizerBase)`. Every method has a time limit and says
    what it waited for. The coroutines of one engine are awaited on one event loop.
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

    Between `sleep` and the last `wake` it generates nothing; requests in flight wait, and go on afterwards: their keys
    and values are computed again. A failure raises RunFailedError and leaves an engine that generates nothing more.
    """

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the device's memory between two tokens.

        Args:
            keep_weights: Hold the weights in the host's memory until `wake`. Otherwise an update must bring all of
                them.
        """
        ...

    async def wake(self, part: EngineMemory) -> None:
        """Take the memory of this part: `weights`, then `cache`. Weights may be updated between the two."""
        ...


@runtime_checkable
class MayBeDown(Protocol):
    """An engine that cannot generate for a while, such as while its process starts again."""

    def seconds_down(self) -> float:
        """Return the seconds so far in which it could not generate. They do not count in time limits of attempts."""
        ...


class TakesWeights(ABC):
    """Base of an engine with weights of its own, which a `weight_sync` replaces between two tokens.

    An update is `begin_update`, then `load_bucket` until every weight has come, then `finish_update`; one at a time. A
    failure raises RunFailedError and leaves an engine that generates no further token. Members with a default are for
    engines that take long to start, consist of several, or start some again.

    Attributes:
        transports: Transports whose buckets it reads, the best one first.
        takes_adapters: Whether `begin_adapter_update` works, so that adapters alone can be sent.
        longest_start_s: Seconds that `start` and `wait_for_one` may take by the engine's own limits.
        on_awaiting_weights: Called on the event loop when a member has started and awaits weights. The thread that owns
            the backend then publishes to `awaiting_weights`.
    """

    transports: Sequence[str]
    takes_adapters: bool = False
    longest_start_s: float = 0.0
    on_awaiting_weights: Callable[[], None] | None = None

    @property
    def awaiting_weights(self) -> Sequence[TakesWeights]:
        """Return the members that generate nothing until they get weights. May be read on any thread."""
        return ()

    @property
    def weights_dtype(self) -> str | None:
        """Return the dtype of its weights once it has started, such as `bfloat16`; None if it takes any."""
        return None

    @property
    def receivers(self) -> Mapping[str, int]:
        """Return who takes part in the update under way: name of each member -> its processes that hold weights.

        A member that is started again has another name. After a `BucketLostError` of some, the others remain.
        """
        return {"the engine": 1}

    def holder_of(self, name: str) -> str | None:
        """Return the member with this request; None while it waits for one. May be called on any thread."""
        return "the engine"

    async def start(self) -> None:
        """Return when it and all its members can take weights; without this it starts with the first use."""
        return

    async def wait_for_one(self) -> None:
        """Return when it, or at least one of its members, can take weights."""
        return

    @abstractmethod
    async def begin_update(self, version: int) -> None:
        """Stop between two tokens; requests in flight wait."""

    async def begin_adapter_update(self, version: int, adapter: Mapping[str, Any]) -> None:
        """Begin an update with the tensors of an adapter alone, on the weights the engine was started with.

        Only called where `takes_adapters`. Tensors have the names of `adapter_model.safetensors`.

        Args:
            adapter: Its settings as PEFT writes them to `adapter_config.json`.
        """
        raise NotImplementedError

    @abstractmethod
    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Take these weights. Afterwards the transport may use the bucket's memory for the next one.

        Raises:
            BucketLostError: If it did not come and nothing was taken, so that it may be sent again.
        """

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Go on with the new weights; tokens generated from now on carry this version.

        Keys and values of requests in flight are computed again, unless the engine's config says otherwise.

        Raises:
            RunFailedError: If weights are missing.
        """
