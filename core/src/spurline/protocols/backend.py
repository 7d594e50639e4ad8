"""Kind `backend`: where forward, backward and the optimizer run, and what some backends can besides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig
from spurline.digests import FileDigest
from spurline.errors import ModelError, UserError
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.ranks import RankRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from spurline.data.batch import TrainingBatch
    from spurline.protocols.dataset import KnowsLongest
    from spurline.protocols.host import LoadedView
    from spurline.protocols.loss import Objective


Role = Literal["policy", "reference", "critic"]
"""`policy` is the model that acts and is trained. `reference` is the policy as it was when the run began, and is never
trained. `critic` is a model with a value head and its own optimizer; it exists if the run has a section `critic`."""


def check_trained(role: Role, *, has_critic: bool) -> None:
    """Raise ModelError for a role whose model is not trained. `has_critic` says whether the run has a critic."""
    if role == "reference":
        raise ModelError("The reference model is the model before training: it is never trained itself.")
    if role == "critic" and not has_critic:
        raise ModelError("This run has no critic. Add a section `critic: {}`, or choose an advantage without one.")


@dataclass(frozen=True)
class LossSums:
    """Sums over loss tokens; the caller adds those of several batches and then divides.

    Attributes:
        loss: Sum of weight * loss, in nats.
        weight: Sum of weights.
        tokens: Number of loss tokens.
        metrics: Sums of weight * value of the loss's own metrics; largest and smallest values are left out.
    """

    loss: float
    weight: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


class Backend(Protocol):
    """Hold a model and its optimizer, on however many ranks, behind one object.

    Factory: `Class(config, run=RunConfig, registry=Registry, total_updates=int)`: `run` gives the sections model,
    optimizer, schedule, critic and seed; `registry` makes the optimizers and the schedule
    (`spurline_models.optimizers.optimization`); `total_updates` is the policy's optimizer steps of the whole run.
    Raises ModelError for a model it cannot train exactly (checked on a small probe at start-up).
    """

    def update(self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy") -> Mapping[str, float]:
        """Make one optimizer step on all rows of a mini-batch, with micro-batching, accumulation and clipping.

        Args:
            batch: The mini-batch.
            objective: The loss and its normaliser. A critic's loss gets values as `logprobs`; see `TokenLossInputs`.
            role: The model that is trained.

        Returns:
            `loss` (weighted sum / normalizer, in nats), `grad_norm` (before clipping), `lr` (and `lr/groups.N` for
            groups of the optimizer), the metrics of the loss, and `time/forward_backward` and `time/optimizer` in
            seconds.

        Raises:
            ModelError: If the backend does not train this role, such as the critic of a run without one.
            NonFiniteLossError: If loss or gradient norm is not finite. Nothing has changed then.
        """
        ...

    def gradients(
        self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (hf_name, gradient) of what `update` minimises, on CPU, unclipped, and change nothing."""
        ...

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> LossSums:
        """Return loss sums without gradients, in evaluation mode; `objective.normalizer` is not applied."""
        ...

    def logprobs(self, batch: TrainingBatch, role: Role = "policy", *, temperature: float = 1.0) -> Tensor:
        """Return the logprob of the token at each position with loss weight, 0 elsewhere: float32 [R, L] on CPU.

        R counts real rows only. `temperature` is that of `Objective`. For `critic` the result has its values, which
        have no temperature. Runs in evaluation mode, without gradients, and draws no random numbers.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (hf_name, tensor) for publishing and export; adapters merged, tied weights once."""
        ...

    def write_weights(self, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
        """Write `named_weights` as safetensors files with an index, named and divided as transformers does.

        Floating point weights get `dtype`; a tensor larger than `max_file_bytes` has its own file. No process holds
        the whole model. Raises OSError for a disk that is full.
        """
        ...

    def facts(self) -> Mapping[str, int | str]:
        """Return facts about the model for a report: `parameters` and `trainable_parameters` (counts), `device`.

        Models that cannot read packed rows have `reads`, those whose config asks for dropout or noise `draws`.
        """
        ...

    def save(self, path: Path) -> Mapping[str, FileDigest]:
        """Write model, optimizer, scheduler and RNG state into this empty folder, without pickle.

        Returns digests, by path in the folder, of the files that the backend has hashed and forced to disk itself. The
        caller hashes and syncs all others.
        """
        ...

    def load(self, path: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
        """Restore what `save` wrote, also on another number of ranks. Raises CheckpointError if it does not fit.

        If the facts say `verifies_files`, files with `digests` are verified here, before anything is changed.
        """
        ...

    def close(self) -> None:
        """End all processes and free device memory."""
        ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """A backend that can be saved while it trains on; its facts say `takes_snapshots`."""

    def snapshot(self) -> Callable[[Path], Mapping[str, FileDigest]]:
        """Copy what `save` writes to the memory of the host, and return a function that writes it.

        The function may be called once, on another thread, while the backend is used. The next snapshot uses the same
        memory; it is asked for when this one has been written or given up. Raises RunFailedError if memory is short.
        """
        ...


@runtime_checkable
class Generates(Protocol):
    """A backend that continues prompts itself, for answers to held-out prompts; its facts say `generates`."""

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """Return greedy continuations, one per prompt, with the end-of-sequence token if there was one."""
        ...


@runtime_checkable
class TrainsAdapters(Protocol):
    """A backend that may train adapters, and can tell them from the weights below them."""

    def adapter_settings(self) -> Mapping[str, Any] | None:
        """Return the settings of the policy's adapter, as in PEFT's `adapter_config.json`; None without an adapter."""
        ...

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of the policy's adapter, named as in `adapter_model.safetensors` of PEFT.

        A backend that `MakesBuckets` makes buckets of them if `MakerChoice.part` asks for that.
        """
        ...


@runtime_checkable
class YieldsDevice(Protocol):
    """A backend that can give the memory of its devices to engines that generate while it does not train.

    Between the two calls it can give weights and facts, save and close. Other calls raise RunFailedError.
    """

    def yield_device(self, *, keep_weights: bool) -> None:
        """Move the state of the backend, such as the optimizer's, to the host's memory, and free the device.

        With `keep_weights` the weights of the models stay on the device; a second call may free these too. Raises
        RunFailedError if the host has too little memory. `take_device` brings everything back.
        """
        ...

    def take_device(self) -> None:
        """Bring everything back, bit for bit. Raises RunFailedError if the device has too little memory."""
        ...


@dataclass(frozen=True)
class GenerationModel:
    """A model and what its owner knows about it.

    Attributes:
        causal: The model, whose logits depend on the decoder's last hidden states alone.
        computing: Makes the context of a forward pass, such as autocast.
        max_tokens: Most tokens of prompt and response together; None without a limit.
        reads_streams: Whether tokens are mixed only in an attention that can be replaced.
    """

    causal: PreTrainedModel
    computing: Callable[[], AbstractContextManager[object]]
    max_tokens: int | None
    reads_streams: bool = True


@runtime_checkable
class LendsModel(Protocol):
    """A backend whose whole model is in this process; its facts say `lends_model`."""

    def generation_model(self) -> GenerationModel:
        """Return the very model that is trained.

        The borrower may change its mode and attention, and restores both before the backend is called again.
        """
        ...


@runtime_checkable
class LendsParameters(Protocol):
    """A backend whose trained parameters can be read, and replaced for a while; its facts say `lends_parameters`.

    Names are the model's own; adapters count as parameters, and the weights that they adapt do not. Both methods raise
    ModelError for a role that is not trained.
    """

    @property
    def is_swapped(self) -> bool:
        """Return whether a context of `swapped` is open."""
        ...

    def trained_parameters(self, role: Role = "policy") -> Mapping[str, Tensor]:
        """Return the tensors that the optimizer of this role changes, by name; fp32 masters if there are some.

        They are detached and for reading. The next optimizer step changes them, so clone what you keep.
        """
        ...

    def swapped(self, role: Role, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context in which parameters of this role have other values; then the old ones return, bit for bit.

        Values are cast to the parameter's dtype and may be on any device. Logprobs, evaluation, generation and
        `named_weights` see them; `update`, `save` and `load` are refused inside. Raises ModelError, before anything is
        changed, for a name that is not trained and for another shape.
        """
        ...


@dataclass(frozen=True)
class BackendFacts:
    """Facts of a backend's settings that the rest of a run may ask for before anything is loaded."""

    generates: bool = False
    """True if its backend `Generates`; `evaluation.generate` needs that."""
    lends_model: bool = False
    """True if its backend `LendsModel`, as an engine needs that generates with the very model trained."""
    lends_parameters: bool = False
    """True if its backend `LendsParameters`, as plugins need that average weights."""
    yields_device: bool = False
    """True if its backend `YieldsDevice`, as engines need that share its devices."""
    takes_snapshots: bool = False
    """True if its backend `TakesSnapshots`, as `checkpoint.async` needs."""
    verifies_files: bool = True
    """If True, the backend's `load` and readers compare the files that the backend hashed with their digests, so that
    ranks can divide that work; otherwise all files are compared when the checkpoint is opened."""
    freezes: bool = False
    """True if its backend leaves out of training what `model.freeze` names."""
    checkpoint_reader: str | None = None
    """`"module:function"` that reads the policy's weights out of a checkpoint in one process, so that a model can be
    exported where it cannot be trained: `function(run: RunConfig, folder: Path, digests) -> WeightStream` of
    `spurline_models.weight_files`; `folder` is what `save` filled, and `digests` as in `load`. Raises CheckpointError.
    If None, the backend is built and loads the checkpoint."""
    adapter_reader: str | None = None
    """`"module:function"` that reads the policy's adapter out of a checkpoint of a run with `trains_adapters`, in the
    same way: `function(run: RunConfig, folder: Path, digests) -> AdapterStream` of
    `spurline_models.adapters.adapter_weights`. None: the backend is built, and must be one that `TrainsAdapters`."""
    stays_on_cpu: bool = False
    """True if it trains in this process on the CPU. The device of ranks is in `rank_request` instead."""
    optimizes_on_host: bool = False
    """True if its optimizer steps in the memory of the host, whatever device computes."""
    replays_experts: bool = False
    """True if its models compute with the experts of a batch's column `routed_experts`, where it has one."""
    balances_experts: bool = False
    """True if its updates add the loss that `model.router_aux_loss` asks for."""
    trains_adapters: bool = False
    """True if adapters are trained instead of all weights."""
    dropout_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """Dropout that the backend itself adds to the model: key path in its section -> rate."""
    computes_in: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Precision of its forward passes, which keys and values have too when an engine borrows the model."""
    device: str = ""
    """The devices in words, to follow the backend's name, such as `on cuda, bf16`; empty for nothing."""


class BackendConfig(ComponentConfig):
    """Settings of a backend; those for Hugging Face models derive from `spurline_models.backend_config`."""

    kind: ClassVar[str] = "backend"

    @property
    def facts(self) -> BackendFacts:
        """Return the facts that sections and plugins may ask for."""
        return BackendFacts()

    def layout(self) -> ParallelLayout:
        """Return the needs of the parallelism in a batch; one process by default."""
        return ParallelLayout()

    def rank_request(self) -> RankRequest | None:
        """Return the processes that its backend starts beside this one; None if it computes in this process."""
        return None

    def missing_here(self) -> str | None:
        """Return a sentence on what this machine lacks for these settings; None when it lacks nothing."""
        return None

    def check_model(self, run: Any) -> None:
        """Raise ConfigError or ModelError for a model or a missing library with which these settings cannot train.

        Reads no weights. A plan asks, and the backend itself before it starts anything.
        """

    def check_trainable(self, run: Any) -> None:
        """Raise ConfigError or ModelError for a model that cannot be trained as the run says, on whatever machine.

        Reads no weights. A plan asks, and a run before it reads its data.
        """

    def check_lengths(
        self, loaded: LoadedView, source: KnowsLongest, evaluations: Sequence[KnowsLongest]
    ) -> Sequence[str]:
        """Return notes on how long the sequences of the data are for the model; none by default.

        A plan asks, and a run before it loads weights. Raises ConfigError for a sequence that is too long.
        """
        return ()

    def notes(self, run: Any) -> Sequence[str]:
        """Return sentences for `spurline plan` and the first lines of a run, on what computes the model and how.

        Reads the model's config and no weights. Raises ModelError if that cannot be read.
        """
        return ()

    def export(
        self,
        backend: Backend,
        loaded: LoadedView,
        tokenizer: PreTrainedTokenizerBase,
        path: Path,
        *,
        replace: bool,
        adapter: bool = False,
    ) -> Path:
        """Write the weights that the backend has at this moment for use elsewhere.

        Args:
            backend: The backend that was built from these settings.
            loaded: The config of the run.
            tokenizer: The tokenizer of the model, which is written too.
            path: A new or empty folder, which is returned.
            replace: Whether to replace an existing folder.
            adapter: Whether to write the adapter alone.

        Raises:
            UserError: If the backend exports nothing, or a folder exists that may not be replaced.
        """
        raise UserError(f"Backend '{self.name}' exports nothing. Remove what asks it to, as checkpoint.export_hf does.")
