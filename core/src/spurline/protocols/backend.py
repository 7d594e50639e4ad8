"""Kind `backend`: where forward, backward and the optimizer run, and what some backends can besides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig
from spurline.digests import FileDigest
from spurline.errors import ModelError
from spurline.protocols.collator import ParallelLayout
from spurline.ranks.group import RankRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from spurline.config.run_config import RunConfig
    from spurline.data.batch import TrainingBatch
    from spurline.model.configs import LoraConfig
    from spurline.protocols.loss import Objective
    from spurline.protocols.weights import MakerChoice, WeightBucket


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
    """Sums over loss tokens, to be divided by whoever joins several batches.

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
    (`spurline.optimizers.optimization`); `total_updates` is the policy's optimizer steps of the whole run.
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
        `spurline.model.weight_files` writes tensors one at a time. Raises OSError for a disk that is full.
        """
        ...

    def facts(self) -> Mapping[str, int | str]:
        """What a report says about the model: `parameters` and `trainable_parameters` (counts), `device`;
        `reads` where the model reads batches in a way that costs more than packed ones, `draws` where its config asks
        for dropout or noise."""
        ...

    def save(self, path: Path) -> Mapping[str, FileDigest]:
        """Write model, optimizer, scheduler and RNG state into this empty folder, without pickle.

        Returns digests of the files that the backend has hashed and forced to disk itself, by path in the folder. The
        caller does so with all others, so an empty mapping will do. Who verifies them: `verifies_files` of its config.
        """
        ...

    def load(self, path: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
        """Restore what `save` wrote, also on another number of ranks. Raises CheckpointError when it does not fit.

        digests: what `save` returned, where the config says `verifies_files`; those files are verified here, before
        anything is changed. None verifies none.
        """
        ...

    def close(self) -> None:
        """End all processes and free device memory."""
        ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """A backend that can be saved while it trains on; its config sets `takes_snapshots`."""

    def snapshot(self) -> Callable[[Path], Mapping[str, FileDigest]]:
        """Copy what `save` writes to the memory of the host, and return what writes it: `save` of this very moment.

        That may be called once, on another thread and while the backend is used. The memory is the next snapshot's,
        which is asked for only when this one has been written or is given up. Raises RunFailedError where there is
        no room.
        """
        ...


@runtime_checkable
class Generates(Protocol):
    """A backend that continues prompts itself, for answers to held-out prompts; its config sets `generates`."""

    def generate(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
        """Greedy continuations, one per prompt, end-of-sequence token included when it was produced."""
        ...


@runtime_checkable
class MakesBuckets(Protocol):
    """A backend whose weights are in other processes, and are made into buckets there, so that they never come here."""

    def weight_buckets(self, version: int, choice: MakerChoice, first: int = 1) -> Iterator[WeightBucket]:
        """All weights, as `named_weights` has them, in buckets that a maker of this choice makes where they are.

        first: number of the first bucket, from 1; what stands before it has been taken over already. The next bucket is
        asked for when every engine has taken the last one over, or before, where the maker can. The maker is kept, with
        what it holds, until another choice is made or the backend is closed; its memory and files go with its process.
        """
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
    """A backend whose whole model is in this process; its config sets `lends_model`."""

    def generation_model(self) -> GenerationModel:
        """The very model that is trained, not a copy.

        Its mode and attention are the borrower's while it generates, and as they were afterwards; the backend must not
        be called meanwhile.
        """
        ...


@runtime_checkable
class LendsParameters(Protocol):
    """A backend whose trained parameters can be read, and replaced for a while; its config sets `lends_parameters`.

    For averages of weights, probes and guards. Names are the model's own; adapters are parameters like any other, and
    what they adapt is not, since it is not trained. Both methods raise ModelError for a role that is not trained.
    """

    @property
    def is_swapped(self) -> bool:
        """Whether a context of `swapped` is open."""
        ...

    def trained_parameters(self, role: Role = "policy") -> Mapping[str, Tensor]:
        """The parameters that the optimizer of this role changes: name -> the tensor itself, in its dtype and place; of
        a weight with an fp32 master that.

        Detached and for reading: the next optimizer step changes what the tensors hold. Clone what you keep.
        """
        ...

    def swapped(self, role: Role, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """A context in which the model of this role has these values; afterwards the old ones, bit for bit.

        values: name -> tensor of the parameter's shape, on any device; cast to the parameter's dtype. Parameters that
        are not named keep their values. Also after an error, the old ones come back. Everything but training sees the
        values: logprobs, evaluation, generation, `named_weights`. `update`, `save` and `load` are refused inside.
        Raises ModelError, before anything is changed, for a name that is not trained and for another shape.
        """
        ...


@dataclass(frozen=True)
class Finding:
    """One line of `spurline doctor`.

    what: what was looked at, in a few words. value: what was found there. fix: what to do; empty when all is well.
    """

    what: str
    value: str
    fix: str = ""


class BackendConfig(ComponentConfig):
    """Settings of a backend, and what a run must know of it before anything is loaded."""

    kind: ClassVar[str] = "backend"
    generates: ClassVar[bool] = False
    """Whether its backend is one that `Generates`; `evaluation.generate` needs that."""
    lends_model: ClassVar[bool] = False
    """Whether its backend is one that `LendsModel`, as an engine needs that generates with the very model trained."""
    lends_parameters: ClassVar[bool] = False
    """Whether its backend is one that `LendsParameters`, as plugins need that average weights."""
    yields_device: ClassVar[bool] = False
    """Whether its backend is one that `YieldsDevice`, as engines need that are colocated with it."""
    takes_snapshots: ClassVar[bool] = False
    """Whether its backend is one that `TakesSnapshots`, as `checkpoint.async` needs."""
    verifies_files: ClassVar[bool] = True
    """Whether its backend's `load` and readers compare the files that it has hashed with their digests, as ranks do
    that divide them; otherwise whoever opens the checkpoint does."""
    freezes: ClassVar[bool] = False
    """Whether its backend leaves out of training what `model.freeze` names."""
    beyond: ClassVar[str] = ""
    """What to do with a model that its settings cannot make fit, as a sentence."""
    update_parts: ClassVar[frozenset[str]] = frozenset()
    """Names of the parts of `estimate_memory` that are given back when an update ends, before anything generates."""
    checkpoint_reader: ClassVar[str | None] = None
    """`"module:function"` that reads the policy's weights out of a checkpoint in one process, so that a model can be
    exported where it cannot be trained: `function(run: RunConfig, folder: Path, digests) -> WeightStream` of
    `spurline.model.weight_files`; `folder` is what `save` filled, and `digests` as in `load`. Raises CheckpointError.
    None: the backend is built and loads the checkpoint."""
    adapter_reader: ClassVar[str | None] = None
    """`"module:function"` that reads the policy's adapter out of a checkpoint of a run with `trains_adapters`, in the
    same way: `function(run: RunConfig, folder: Path, digests) -> AdapterStream` of
    `spurline.model.adapters.adapter_weights`. None: the backend is built, and must be one that `TrainsAdapters`."""

    def layout(self) -> ParallelLayout:
        """What the parallelism asks of a batch; one process by default."""
        return ParallelLayout()

    @property
    def stays_on_cpu(self) -> bool:
        """Whether it leaves the GPUs of this process, if there are any, to others."""
        return False

    @property
    def optimizes_on_host(self) -> bool:
        """Whether its optimizer steps in the memory of the host, whatever device computes."""
        return False

    def rank_request(self) -> RankRequest | None:
        """The processes that its backend starts beside this one; None for a backend that computes in this process."""
        return None

    def describe_device(self) -> str:
        """What the settings say about devices, to follow the backend's name, such as ` on cuda`; empty for nothing."""
        return ""

    @property
    def replays_experts(self) -> bool:
        """Whether its models compute with the experts of a batch's column `routed_experts`, where it has one."""
        return False

    @property
    def balances_experts(self) -> bool:
        """Whether its updates add the loss that `model.router_aux_loss` asks for."""
        return False

    @property
    def adapters(self) -> LoraConfig | None:
        """Settings of the adapters that are trained instead of all weights; None where there are none."""
        return None

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained instead of all weights."""
        return self.adapters is not None

    @property
    def dropout_rates(self) -> Mapping[str, float]:
        """Dropout that the backend itself adds to the model: key path in this section -> rate."""
        return {}

    @property
    def computes_in(self) -> Literal["fp32", "bf16", "fp64"]:
        """Precision of its forward passes, which keys and values have too when an engine borrows the model."""
        return "fp32"

    def missing_here(self) -> str | None:
        """What this machine lacks for training with these settings, as a sentence; None when it lacks nothing."""
        return None

    @property
    def microbatch_bound(self) -> int | None:
        """Tokens that a micro-batch is filled up to where rows are dealt to ranks; None takes a rank's rows at once."""
        return None

    def check_model(self, run: RunConfig) -> None:
        """Raise ConfigError or ModelError for a model that these settings cannot train, as its own config tells, and
        for a library that they need and that is missing.

        Reads no weights. A plan asks, and the backend itself before it starts anything.
        """

    def describe_layout(self, run: RunConfig) -> Sequence[str]:
        """Sentences on its ranks, for `spurline plan`: how many, where, and in which groups; none for one process."""
        return ()

    def notes(self, run: RunConfig) -> Sequence[str]:
        """Sentences on what computes the model where it is not plain PyTorch, and on what these settings do otherwise
        here, or for this model, than one may think.

        For `spurline plan` and the first lines of a run. As the model's own config tells: reads no weights. Raises
        ModelError where that cannot be read.
        """
        return ()

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        """Bytes on the fullest device by part, for a step of so many tokens in rows of this length; {} if unknown."""
        return {}

    def estimate_generation(self, run: RunConfig) -> dict[str, int]:
        """Bytes on the fullest device by part that `evaluation.generate` takes beside what stays between updates."""
        return {}

    def estimate_yielded(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        """Bytes by part that stay on the fullest device while engines have it and weights are kept.

        Where weights leave too, nothing stays. Arguments, and names of the parts, as in `estimate_memory`.
        """
        parts = self.estimate_memory(run, row_length, tokens)
        kept = {name: parts[name] for name in ("weights", "reference") if name in parts}
        # As large as the policy but for its output layer.
        return kept | ({"critic": parts["weights"]} if "critic" in parts else {})

    def estimate_host_memory(self, run: RunConfig) -> int:
        """Bytes in the memory of the fullest machine that stand for parts kept off its devices."""
        return 0

    def estimate_offloaded_activations(self, run: RunConfig, row_length: int, tokens: int) -> int:
        """Bytes of activations in the memory of the fullest machine, kept off its devices; to come to
        `estimate_host_memory`. Arguments as in `estimate_memory`.
        """
        return 0

    def device_bytes(self) -> int | None:
        """Memory of the smallest device that it would train on here; None where that is not known."""
        return None

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        """Changes of this section that need less memory, each tried on top of those before: the cheapest in time first.

        A key is that of a setting, such as `compile`, or of one in a section of this one, such as `lora.base_dtype`.
        row_length, tokens: as in `estimate_memory`. With each the section stays valid. A plan suggests what is needed.
        """
        return ()

    def suggested_layouts(
        self, run: RunConfig, row_length: int, tokens: int, device_bytes: int, usable_bytes: int
    ) -> Iterable[str]:
        """Lines on how its ranks could be divided otherwise, for `spurline plan`: what fits, the fastest first; none
        for a backend with one way.

        row_length, tokens: as in `estimate_memory`. device_bytes: memory of a device, of which a plan counts on
        usable_bytes.
        """
        return ()

    def doctor(self, run: RunConfig) -> Iterator[Finding]:
        """What `spurline doctor` finds by starting what a run would start, all but the model; nothing by default.

        Yields as it finds. What fails is a Finding with its fix, and not an error.
        """
        return iter(())
