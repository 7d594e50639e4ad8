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
    """If true, its `share` takes the model itself from the backend, which must then be one that `LendsModel`."""
    holds_copy: ClassVar[bool] = False
    """If true, it can generate with a copy in this process too, and takes tensors for it (transport `in_process`)."""
    takes_less: ClassVar[str] = ""
    """Sentences on the settings with which a colocated engine leaves a trainer more of the device."""

    @property
    def notes_experts(self) -> bool:
        """Return whether its results have `routed_experts` where the run's source asks for router replay."""
        return False

    @property
    def is_colocated(self) -> bool:
        """Return whether its engines, each a `MaySleep`, and the backend have the same devices by turns."""
        return False

    @property
    def offloads_trainer(self) -> bool:
        """Return whether the backend's weights too leave the devices while colocated engines generate."""
        return False

    @property
    def update_limit_s(self) -> float | None:
        """Seconds that an engine may take for one bucket of weights before it is ended; None where nothing ends it."""
        return None

    @property
    def start_limit_s(self) -> float | None:
        """Seconds that its engines may take to start; None where they are there at once."""
        return None

    @property
    def num_engines(self) -> int:
        """Engines that requests are spread over."""
        return 1

    @property
    def is_elsewhere(self) -> bool:
        """Return whether it may be on another machine than this process."""
        return False

    @property
    def context_tokens(self) -> int | None:
        """Tokens that its own settings allow prompt and response together; None where the model alone sets a limit."""
        return None

    def estimate_memory(self, run: RunConfig, responses: int, length: int) -> dict[str, int]:
        """Bytes by part on the trainer's device while so many responses of this length, prompts included, are written.

        {} for an engine that generates elsewhere, or where it is not known.
        """
        return {}

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> dict[EngineMemory, int]:
        """Bytes on the fullest device of what a colocated engine wakes there; {} where it is not known.

        Args:
            device_bytes: Memory of the device. Responses as above.
        """
        return {}

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        """Sentences for `spurline plan`: where it generates, and what memory it takes there, responses as above."""
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
        stop_token_ids: Besides the model's own end tokens; they end the response and belong to it.
        stop: Texts that end the response; the tokens up to the one that completes a text belong to it.
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
        name: Who asks, for messages: `train:17@40 sample 3 turn 0`.
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
        raw_logprobs: float32 [A], of the model's own distribution (temperature 1, all tokens); None from an engine that
            does not know them.
        versions: int32 [A], the version of the weights each token came from.
        finish_reason: `stop` at an end token or stop text, `length` at the limit of tokens or context.
        routed_experts: int16 [P + A, layers, top_k], the experts that were chosen while prompt and response were
            computed: for each token those of the first time it was, and -1 where it never was, as for the last one.
            None from an engine that was not asked to note them.
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
        """One continuation; concurrent calls are batched.

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
    """An engine that can generate with the very weights a backend in this process trains."""

    def share(self, backend: Backend) -> None:
        """Generate with the backend's weights from now on. Raises ConfigError when the backend does not lend them."""
        ...

    def set_version(self, version: int) -> None:
        """The weights have been updated; tokens generated from now on carry this version."""
        ...


@runtime_checkable
class MaySleep(Protocol):
    """An engine that can give the memory of its device to others between two tokens.

    Between `sleep` and the last `wake` it generates nothing; requests in flight wait, and go on afterwards: their keys
    and values are computed again. A failure raises RunFailedError and leaves an engine that generates nothing more.
    """

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the device's memory when it is standing still. keep_weights: hold them in the host's memory until `wake`
        brings them back; else they are gone, and an update has to bring all of them."""
        ...

    async def wake(self, part: EngineMemory) -> None:
        """Take the memory of this part again: `weights`, then `cache`. Weights may be updated between the two."""
        ...


@runtime_checkable
class MayBeDown(Protocol):
    """An engine that there may be none of for a while, such as while one that died is started again."""

    def seconds_down(self) -> float:
        """Seconds so far in which no engine could generate; they do not count against the time limit of an attempt."""
        ...


class TakesWeights(ABC):
    """Base of an engine with weights of its own, which a `weight_sync` replaces between two tokens.

    `begin_update`, then `load_bucket` until every weight has come, then `finish_update`; one update at a time. A
    failure on the way raises RunFailedError and leaves an engine that generates no further token.

    What has a default here is for an engine that takes long to start, consists of several, or starts some again.

    Attributes:
        transports: Those whose buckets it reads, the best one first.
        takes_adapters: Whether `begin_adapter_update` works, so that adapters alone need be sent.
        longest_start_s: Seconds that `start` and `wait_for_one` may take by the engine's own limits.
        on_awaiting_weights: Called on the event loop when a member has been started and awaits weights; then look at
            `awaiting_weights`, and publish to them from the thread that owns the backend.
    """

    transports: Sequence[str]
    takes_adapters: bool = False
    longest_start_s: float = 0.0
    on_awaiting_weights: Callable[[], None] | None = None

    @property
    def awaiting_weights(self) -> Sequence[TakesWeights]:
        """Members that generate nothing until they alone, or all, get weights. May be read on any thread."""
        return ()

    @property
    def weights_dtype(self) -> str | None:
        """Return the dtype of its weights once it has started, as torch writes it without `torch.`; None if it takes
        them as they come."""
        return None

    @property
    def receivers(self) -> Mapping[str, int]:
        """Who takes part in the update under way: name of each member -> its processes that hold weights.

        A member that is started again has another name. A `BucketLostError` of some of them leaves those that are left.
        """
        return {"the engine": 1}

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

    async def begin_adapter_update(self, version: int, adapter: Mapping[str, Any]) -> None:
        """Begin an update, for buckets with the tensors of an adapter alone, on the weights the engine was started
        with. Only called where `takes_adapters`.

        Args:
            adapter: Its settings as PEFT writes them to `adapter_config.json`. Tensors have the names of
                `adapter_model.safetensors`, such as `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.
        """
        raise NotImplementedError

    @abstractmethod
    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Take these weights over. When it returns, the transport may use the bucket's memory for the next one.

        Raises:
            BucketLostError: If it did not come and nothing was taken, so that it may be sent again.
        """

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Go on with the new weights; tokens generated from now on carry this version.

        Nothing computed with the old weights is used any more: keys and values of requests in flight are computed
        again, unless the engine's config says otherwise.

        Raises:
            RunFailedError: If weights are missing.
        """
