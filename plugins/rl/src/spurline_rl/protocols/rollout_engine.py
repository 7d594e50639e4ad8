"""Kind `rollout_engine`: generate tokens from the current weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

from spurline.config.section import ComponentConfig
from spurline.errors import RunFailedError

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
    """If true, the engine can also generate with its own copy of the model, updated with tensors of this process."""
    takes_less: ClassVar[str] = ""
    """Advice for messages: settings with which a colocated engine takes less memory."""

    @property
    def notes_experts(self) -> bool:
        """Return whether results have `routed_experts` when the source asks for router replay."""
        return False

    @property
    def recomputes_cache(self) -> bool:
        """Return whether keys and values of unfinished responses are computed again after an update."""
        return True

    @property
    def is_colocated(self) -> bool:
        """Return whether engine and backend take turns on the same devices. The engine must then be a `MaySleep`."""
        return False

    @property
    def offloads_trainer(self) -> bool:
        """Return whether weights too, not only the optimizer, leave the devices while a colocated engine generates."""
        return False

    @property
    def update_limit_s(self) -> float | None:
        """Return the seconds that an engine may take to load a bucket of weights; None for no limit."""
        return None

    @property
    def start_limit_s(self) -> float | None:
        """Return the seconds that the engines may take to start; None if they start at once."""
        return None

    @property
    def num_engines(self) -> int:
        """Return the number of engines that share the requests."""
        return 1

    @property
    def is_elsewhere(self) -> bool:
        """Return whether the engine may run on another machine."""
        return False

    @property
    def context_tokens(self) -> int | None:
        """Return the largest number of tokens of prompt and response; None if the model sets the limit."""
        return None

    def estimate_memory(self, run: RunConfig, responses: int, length: int) -> dict[str, int]:
        """Return how many bytes generation takes on the trainer's device, by part of the memory.

        The mapping is empty if the engine is on other devices, or if the bytes are unknown.

        Args:
            responses: Responses generated at the same time.
            length: Tokens of each response and its prompt.
        """
        return {}

    def colocated_memory(
        self, run: RunConfig, responses: int, length: int, device_bytes: int
    ) -> dict[EngineMemory, int]:
        """Return the bytes that an awake colocated engine takes on its fullest device; {} if they are unknown."""
        return {}

    def describe(self, run: RunConfig, responses: int, length: int) -> Sequence[str]:
        """Return sentences for `spurline plan` about the engine's devices and memory."""
        return ()


EngineMemory = Literal["weights", "cache"]
"""A part of an engine's memory: the weights, or the keys and values of requests."""


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling a response.

    Attributes:
        temperature: 0 decodes greedily.
        top_p: 1.0 keeps all tokens.
        top_k: 0 keeps all tokens.
        max_new_tokens: Largest number of tokens of the response, including the end token.
        stop_token_ids: End tokens besides the model's own. The response includes its end token.
        stop: Texts that end the response. The response includes the token that completes a text.
        ignore_eos: Whether the model's own end tokens do not end the response.
        support_width: If positive, the result has `support` with this number of columns.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    support_width: int = 0


@dataclass(frozen=True)
class GenerationRequest:
    """One continuation to generate.

    Attributes:
        seed: Random seed. Equal requests and weights give the same tokens.
        name: Name for messages, such as `train:17@40 sample 3 turn 0`.
        is_urgent: Whether the engine begins this request before others that wait. An engine may ignore it.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    seed: int
    name: str
    is_urgent: bool = False


@dataclass(frozen=True)
class GenerationResult:
    """The result of one request.

    Attributes:
        token_ids: int32 [A], including the end token.
        logprobs: float32 [A], logprobs after temperature, top-p and top-k.
        versions: int32 [A], the version of the weights that generated each token.
        finish_reason: `stop` for an end token or stop text, `length` if the response or the context is full.
        routed_experts: int16 [P + A, layers, top_k], the experts of each token when it was first computed; -1 for a
            token that was not computed, such as the last token. None if the run does not ask for them.
        engines: Names of the engines that generated the tokens, in order, such as `engine 0 (process 4711)`.
        support: int32 [A, support_width], ids of the tokens that top_p and top_k kept for each token, padded with -1.
            If more were kept, all are -1, and the token is not trained on. None if the request asks for none.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    routed_experts: NDArray[np.int16] | None = None
    engines: tuple[str, ...] = ()
    support: NDArray[np.int32] | None = None


class RolloutEngine(Protocol):
    """Generate continuations.

    Factory: `Class(config, run=RunConfig, tokenizer=PreTrainedTokenizerBase)`. Every method has a time limit. If it is
    exceeded, the error names what the method waited for. The coroutines of one engine are awaited on one event loop.
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
        """Continue to generate, with the current weights."""
        ...

    async def close(self) -> None:
        """End the engine and its processes; requests in flight fail with RunFailedError."""
        ...


@runtime_checkable
class SharesWeights(Protocol):
    """An engine that can generate with the weights that a backend in this process trains."""

    def share(self, backend: Backend) -> None:
        """Generate all later tokens with the backend's weights. Raises ConfigError if the backend lends no weights."""
        ...

    def set_version(self, version: int) -> None:
        """Mark all later tokens with this version. It is called after an update of the weights."""
        ...


@runtime_checkable
class MaySleep(Protocol):
    """An engine that can free the memory of its device between two tokens.

    Between `sleep` and the last `wake` it generates nothing, and requests in flight wait. After the last `wake`, their
    keys and values are computed again, and the requests continue. After a RunFailedError nothing more is generated.
    """

    async def sleep(self, *, keep_weights: bool) -> None:
        """Free the device's memory between two tokens.

        Args:
            keep_weights: Keep the weights in the host's memory until `wake`. If false, an update must bring all
                weights before `wake("cache")` is called.
        """
        ...

    async def wake(self, part: EngineMemory) -> None:
        """Allocate the memory of a part. Call it for `weights`, then for `cache`; in between, weights may change."""
        ...


class TakesWeights(ABC):
    """Base of an engine with its own weights, which a `weight_sync` replaces between two tokens.

    An update is `begin_update`, then `load_bucket` until every weight has arrived, then `finish_update`. Updates do not
    overlap. After a RunFailedError the engine generates no more tokens. An engine may have several members, which are
    engines that share the requests. Such an engine, and an engine that starts slowly, overrides the concrete methods.

    Attributes:
        transports: Names of the transports whose buckets the engine reads, the best one first.
        takes_adapters: Whether the engine implements `begin_adapter_update`, which updates only an adapter's weights.
        longest_start_s: Seconds after which `start` and `wait_for_one` fail.
        on_awaiting_weights: Called on the event loop when a member has started and needs weights. The thread that owns
            the backend then publishes to `awaiting_weights`.
        crossing: A request that each member begins just before an update, so that it goes on with the new weights; None
            for no such request. Engines without members may ignore it.
        needs_proof: Whether a response drops, when its member dies, the member's tokens of versions that the member has
            not proven (see `accept`).
    """

    transports: Sequence[str]
    takes_adapters: bool = False
    longest_start_s: float = 0.0
    on_awaiting_weights: Callable[[], None] | None = None
    crossing: GenerationRequest | None = None
    needs_proof: bool = False

    @property
    def awaiting_weights(self) -> Sequence[TakesWeights]:
        """Return the members that wait for weights. May be read on any thread."""
        return ()

    @property
    def weights_dtype(self) -> str | None:
        """Return the dtype of the engine's weights, such as `bfloat16`; None if it takes any. Call `start` first."""
        return None

    @property
    def receivers(self) -> Mapping[str, int]:
        """Return the members that take part in the current update, with the number of processes of each.

        A member that is started again has a new name. Members that died are left out.
        """
        return {"the engine": 1}

    def holder_of(self, name: str) -> str | None:
        """Return the member that works on this request; None if the request waits. May be called on any thread."""
        return "the engine"

    def seconds_down(self) -> float:
        """Return for how many seconds so far no member could generate. Time limits of attempts leave this time out."""
        return 0.0

    async def start(self) -> None:
        """Wait until all members can take weights. If not called, the engine starts when it is first used."""
        return

    async def wait_for_one(self) -> None:
        """Wait until at least one member can take weights."""
        return

    async def generate_on_each(
        self, request: GenerationRequest, names: Collection[str] | None = None
    ) -> Mapping[str, GenerationResult]:
        """Generate the same continuation on each of the members with these names, or on all that have weights.

        Returns:
            The results by the member's name. A member that died has a result without tokens.
        """
        return {"the engine": await cast("RolloutEngine", self).generate(request)}

    async def take_crossed(self, version: int, num_tokens: int) -> Mapping[str, GenerationResult]:
        """End the request `crossing` on each member that began it before the last update. Return the results by name.

        Args:
            num_tokens: A request ends when it has this many tokens of this version. Its result has no later tokens.
        """
        return {}

    def accept(self, name: str, version: int) -> None:  # noqa: B027 - only engines with members need it
        """Note that this member has proven to generate with the weights of this version."""

    def reject(self, name: str, reason: str) -> None:
        """Replace a member that does not generate with the weights of the version that it claims. The caller says so.

        A request in flight keeps this member's tokens up to the last version that the member has proven.

        Raises:
            RunFailedError: If it cannot be replaced, or if the last replacement was rejected too.
        """
        raise RunFailedError(f"{name} cannot be replaced: {reason}.")

    @abstractmethod
    async def begin_update(self, version: int) -> None:
        """Stop between two tokens; requests in flight wait."""

    async def begin_adapter_update(self, version: int, adapter: Mapping[str, Any]) -> None:
        """Begin an update of an adapter. The other weights stay as they were at the engine's start.

        It is called only if `takes_adapters` is true. Tensors are named as in `adapter_model.safetensors`.

        Args:
            adapter: The settings of the adapter, as PEFT writes them to `adapter_config.json`.
        """
        raise NotImplementedError

    @abstractmethod
    async def load_bucket(self, bucket: WeightBucket) -> None:
        """Load these weights. When it returns, the transport may use the bucket's memory for the next bucket.

        Raises:
            BucketLostError: If the bucket did not arrive. It may be sent again.
        """

    @abstractmethod
    async def finish_update(self, version: int) -> None:
        """Continue to generate, with the new weights. All later tokens have this version.

        Keys and values of requests in flight are computed again, unless the engine's config says otherwise.

        Raises:
            RunFailedError: If weights are missing.
        """
