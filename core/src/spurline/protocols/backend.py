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
    from spurline.protocols.host import LoadedView
    from spurline.protocols.lengths import KnowsLongest
    from spurline.protocols.loss import Objective


Role = Literal["policy", "reference", "critic"]
"""policy: the model that acts and is trained. reference: that model as it was when the run began, never trained.
critic: a model with a value head, there when the run has a section `critic`, with an optimizer and learning rate of its
own."""


def check_trained(role: Role, *, has_critic: bool) -> None:
    """Raise ModelError for a role whose model is not trained. has_critic: whether the run has a critic."""
    if role == "reference":
        raise ModelError("The reference model is the model before training: it is never trained itself.")
    if role == "critic" and not has_critic:
        raise ModelError("This run has no critic. Add a section `critic: {}`, or choose an advantage without one.")


@dataclass(frozen=True)
class LossSums:
    """Sums over loss tokens; the caller adds those of several batches and then divides.

    loss: sum of weight * loss, in nats. weight: sum of weights. tokens: number of loss tokens.
    metrics: sums of weight * value of the loss's own metrics, without those that are a largest or smallest value.
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
        """One optimizer step on all rows of a mini-batch; micro-batching, accumulation and clipping happen inside.

        role: the model that is trained. Raises ModelError for one that this backend does not train, such as the
        critic of a run that has none. To a critic's loss, `logprobs` are values (see `TokenLossInputs`).
        Returns `loss` (weighted sum / normalizer, nats), `grad_norm` (before clipping), `lr` (and `lr/groups.N` of the
        optimizer's groups), the loss's own metrics, and `time/forward_backward`, `time/optimizer` in seconds.
        Raises NonFiniteLossError before anything changed when loss or gradient norm is not finite.
        """
        ...

    def gradients(
        self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        """(hf_name, gradient) of the same objective, on CPU, unclipped, leaving weights and optimizer untouched.

        role: as in `update`.
        """
        ...

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> LossSums:
        """Loss sums without gradients, in evaluation mode; `objective.normalizer` is not applied."""
        ...

    def logprobs(self, batch: TrainingBatch, role: Role = "policy", *, temperature: float = 1.0) -> Tensor:
        """Logprob of the token at each position with loss weight, 0 elsewhere: float32 [R, L] on CPU.

        Padding rows are dropped, so R counts real rows only. temperature: as in `Objective`. For `critic` they are its
        values, which have no temperature. In evaluation mode, without gradients; draws no random numbers. Models of
        other roles than the policy take memory from when they are first asked for at the latest.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(hf_name, tensor) for publishing and export; adapters merged, tied weights once. Consume one at a time."""
        ...

    def write_weights(self, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
        """Write what `named_weights` gives as safetensors files, with their index, into this empty folder.

        As transformers names and divides them. dtype: of floating point weights. max_file_bytes: of one file; a larger
        tensor has a file of its own. The model is never held as a whole by one process: `write_weight_files` of
        `spurline_models.weight_files` writes tensors one at a time. Raises OSError for a disk that is full.
        """
        ...

    def facts(self) -> Mapping[str, int | str]:
        """Return facts about the model for a report: `parameters` and `trainable_parameters` (counts), `device`;
        `reads` where the model reads batches in a way that costs more than packed ones, `draws` where its config asks
        for dropout or noise."""
        ...

    def save(self, path: Path) -> Mapping[str, FileDigest]:
        """Write model, optimizer, scheduler and RNG state into this empty folder, without pickle.

        Returns digests of the files that the backend has hashed and forced to disk itself, by path in the folder. The
        caller does so with all others, so an empty mapping will do. Who verifies them: `verifies_files` of its facts.
        """
        ...

    def load(self, path: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
        """Restore what `save` wrote, also on another number of ranks. Raises CheckpointError when it does not fit.

        digests: what `save` returned, where the facts say `verifies_files`; those files are verified here, before
        anything is changed. None verifies none.
        """
        ...

    def close(self) -> None:
        """End all processes and free device memory."""
        ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """A backend that can be saved while it trains on; its facts say `takes_snapshots`."""

    def snapshot(self) -> Callable[[Path], Mapping[str, FileDigest]]:
        """Copy what `save` writes to the memory of the host, and return what writes it: `save` of this very moment.

        That may be called once, on another thread and while the backend is used. The memory is the next snapshot's,
        which is asked for only when this one has been written or is given up. Raises RunFailedError where there is
        no room.
        """
        ...


@runtime_checkable
class Generates(Protocol):
    """A backend that continues prompts itself, for answers to held-out prompts; its facts say `generates`."""

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """Greedy continuations, one per prompt, end-of-sequence token included when it was produced."""
        ...


@runtime_checkable
class TrainsAdapters(Protocol):
    """A backend that may train adapters, and can tell them from the weights below them."""

    def adapter_settings(self) -> Mapping[str, Any] | None:
        """Settings of the policy's adapter, as PEFT writes them to `adapter_config.json`; None: it has none."""
        ...

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of the policy's adapter as `adapter_model.safetensors` has them, such as
        `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`: what `named_weights` is for the model.

        A backend that `MakesBuckets` makes buckets of them where `MakerChoice.part` asks for that.
        """
        ...


@runtime_checkable
class YieldsDevice(Protocol):
    """A backend that can give the memory of its devices to engines that generate while it does not train.

    Between the two calls it may be asked for weights, to save, and for facts, and to close. All else raises
    RunFailedError.
    """

    def yield_device(self, *, keep_weights: bool) -> None:
        """Move what is kept between updates, such as the optimizer's state, to the host's memory, and free the rest.

        keep_weights: let the weights of the models stay on the device. May be called again to free these too.
        Raises RunFailedError when the host has no room; what was moved comes back with `take_device`.
        """
        ...

    def take_device(self) -> None:
        """Bring everything back, bit for bit; nothing where nothing was given. Raises RunFailedError when the memory is
        not there."""
        ...


@dataclass(frozen=True)
class GenerationModel:
    """A model and what its owner knows about it.

    causal: its logits depend on the decoder's last hidden states alone.
    computing: makes the context of a forward pass, such as autocast.
    max_tokens: prompt and response together; None without a limit.
    reads_streams: whether its decoder hands keyword arguments on to an attention that can be replaced, and mixes tokens
    nowhere else.
    """

    causal: PreTrainedModel
    computing: Callable[[], AbstractContextManager[object]]
    max_tokens: int | None
    reads_streams: bool = True


@runtime_checkable
class LendsModel(Protocol):
    """A backend whose whole model is in this process; its facts say `lends_model`."""

    def generation_model(self) -> GenerationModel:
        """Return the very model that is trained, not a copy.

        Its mode and attention are the borrower's while it generates, and as they were afterwards; the backend must not
        be called meanwhile.
        """
        ...


@runtime_checkable
class LendsParameters(Protocol):
    """A backend whose trained parameters can be read, and replaced for a while; its facts say `lends_parameters`.

    For averages of weights, probes and guards. Names are the model's own; adapters are parameters like any other, and
    what they adapt is not, since it is not trained. Both methods raise ModelError for a role that is not trained.
    """

    @property
    def is_swapped(self) -> bool:
        """Return whether a context of `swapped` is open."""
        ...

    def trained_parameters(self, role: Role = "policy") -> Mapping[str, Tensor]:
        """The parameters that the optimizer of this role changes: name -> the tensor itself, in its dtype and place; of
        a weight with an fp32 master that.

        Detached and for reading: the next optimizer step changes what the tensors hold. Clone what you keep.
        """
        ...

    def swapped(self, role: Role, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the model of this role has these values; afterwards the old ones, bit for bit.

        values: name -> tensor of the parameter's shape, on any device; cast to the parameter's dtype. Parameters that
        are not named keep their values. Also after an error, the old ones come back. Everything but training sees the
        values: logprobs, evaluation, generation, `named_weights`. `update`, `save` and `load` are refused inside.
        Raises ModelError, before anything is changed, for a name that is not trained and for another shape.
        """
        ...


@dataclass(frozen=True)
class BackendFacts:
    """Facts of a backend's settings that the rest of a run may ask for before anything is loaded.

    What a backend is said to do here, its class does by the protocol that is named.
    """

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
    """True if it leaves the GPUs of this process, if there are any, to others."""
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
    microbatch_bound: int | None = None
    """Tokens that a micro-batch is filled up to where rows are dealt to ranks; None takes a rank's rows at once."""
    device: str = ""
    """The devices in words, to follow the backend's name, such as `on cuda, bf16`; empty for nothing."""


class BackendConfig(ComponentConfig):
    """Settings of a backend, and what a run must know of it before anything is loaded.

    Backends of Hugging Face models derive theirs from `ModelBackendConfig` of `spurline_models.backend_config`.
    """

    kind: ClassVar[str] = "backend"

    @property
    def facts(self) -> BackendFacts:
        """Return the facts that sections and plugins may ask for."""
        return BackendFacts()

    def layout(self) -> ParallelLayout:
        """Return the needs of the parallelism in a batch; one process by default."""
        return ParallelLayout()

    def rank_request(self) -> RankRequest | None:
        """The processes that its backend starts beside this one; None for a backend that computes in this process."""
        return None

    def missing_here(self) -> str | None:
        """Return a sentence on what this machine lacks for these settings; None when it lacks nothing."""
        return None

    def check_model(self, run: Any) -> None:
        """Raise ConfigError or ModelError for a model that these settings cannot train, as its own config tells, and
        for a library that they need and that is missing.

        Reads no weights. A plan asks, and the backend itself before it starts anything.
        """

    def check_trainable(self, run: Any) -> None:
        """Raise ConfigError or ModelError for a model that cannot be trained as the run says, on whatever machine.

        Reads no weights. A plan asks, and a run before it reads its data.
        """

    def check_lengths(
        self, loaded: LoadedView, source: KnowsLongest, evaluations: Sequence[KnowsLongest]
    ) -> Sequence[str]:
        """Notes on how long the sequences of the data are for the model; nothing by default.

        A plan asks, and a run before it loads weights. Raises ConfigError for a sequence that is too long, ModelError,
        DataError.
        """
        return ()

    def notes(self, run: Any) -> Sequence[str]:
        """Sentences on what computes the model where it is not plain PyTorch, and on what these settings do otherwise
        here, or for this model, than one may think.

        For `spurline plan` and the first lines of a run. As the model's own config tells: reads no weights. Raises
        ModelError where that cannot be read.
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
            backend: What was made of these settings.
            loaded: The run's.
            tokenizer: The model's, which is written too.
            path: A new or empty folder, which is returned.
            replace: Remove what is there.
            adapter: Write the adapter alone.

        Raises:
            UserError: The backend exports nothing, or something is there that may not be replaced.
        """
        raise UserError(f"Backend '{self.name}' exports nothing. Remove what asks it to, as checkpoint.export_hf does.")
