"""Kind `backend`: run forward, backward and the optimizer. Further protocols describe optional abilities.

The abilities that core uses are here, and others are in `spurline_models.abilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

from spurline.config.section import ComponentConfig
from spurline.digests import FileDigest
from spurline.errors import UserError
from spurline.protocols.collator import ParallelLayout
from spurline.protocols.ranks import RankRequest

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from spurline.data.batch import TrainingBatch
    from spurline.protocols.dataset import KnowsLongest
    from spurline.protocols.host import LoadedView
    from spurline.protocols.loss import Objective


Role = str
"""`policy` is the model that acts and is trained. `critic` is a model with a value head and its own optimizer; it
exists if the run has a section `critic`. All other roles belong to models that are never trained: `reference` is the
policy as it was when the run began, unless `model.frozen` has another one, and other roles are keys of
`model.frozen`."""


@dataclass(frozen=True)
class LossSums:
    """Sums over loss tokens. The caller adds the sums of several batches and then divides.

    Attributes:
        loss: Sum of weight * loss, in nats.
        weight: Sum of weights.
        tokens: Number of loss tokens.
        metrics: Sums of weight * value for each of `Loss.metrics`, except metrics whose name ends in `/max` or `/min`.
        metric_weights: Sums of weights of the metrics that have their own weights. Others have the sum `weight`.
    """

    loss: float
    weight: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    metric_weights: Mapping[str, float] = field(default_factory=dict[str, float])


class Backend(Protocol):
    """Trains a model with an optimizer, on any number of ranks.

    Factory: `Class(config, run=RunConfig, registry=Registry, total_updates=int)`. `run` has the sections model,
    optimizer, schedule, critic and seed. `registry` makes the optimizers and the schedule
    (`spurline_models.optimizers.optimization`). `total_updates` is the number of the policy's optimizer steps in the
    whole run. A backend raises ModelError if a small probe at its start shows that it cannot train the model exactly.
    """

    def update(self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy") -> Mapping[str, float]:
        """Make one optimizer step on all rows of a mini-batch, with micro-batching, accumulation and clipping.

        Args:
            batch: The mini-batch.
            objective: The loss and its normaliser. A critic's loss gets the critic's values as `logprobs`.
            role: The model that is trained.

        Returns:
            `loss` (weighted sum / normalizer, in nats), `grad_norm` (before clipping), `lr`, `lr/groups.N` for groups
            of the optimizer, the metrics of the loss, and `time/forward_backward` and `time/optimizer` in seconds.

        Raises:
            ModelError: If the backend does not train this role, such as the critic of a run without one.
            NonFiniteLossError: If loss or gradient norm is not finite. The backend's state is then unchanged.
        """
        ...

    def gradients(
        self, batch: TrainingBatch, objective: Objective, *, role: Role = "policy"
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (hf_name, unclipped gradient on CPU) of the loss that `update` minimises. Change no state."""
        ...

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> LossSums:
        """Return loss sums without gradients, in evaluation mode. `objective.normalizer` is not applied."""
        ...

    def logprobs(self, batch: TrainingBatch, role: Role = "policy", *, temperature: float = 1.0) -> Tensor:
        """Return the logprob of the token at each position with loss weight, 0 elsewhere: float32 [R, L] on CPU.

        R counts real rows only. `temperature` is as in `Objective`. For the role `critic`, the result is the critic's
        values, and `temperature` has no effect. The model runs in evaluation mode, without gradients or random numbers.
        Of a model with `head: score`, the result is its score at each position, which has read the token itself.
        An untrained model is loaded when it is first used. Raises ModelError for a role that the run does not have.
        """
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (hf_name, tensor) for publishing and export. Adapters are merged. A tied weight is yielded once."""
        ...

    def write_weights(self, folder: Path, dtype: torch.dtype, max_file_bytes: int) -> None:
        """Write `named_weights` as safetensors files with an index, named and split as transformers does.

        Floating point weights are cast to `dtype`. A tensor larger than `max_file_bytes` has its own file. No process
        needs memory for the whole model. Raises OSError if the disk is full.
        """
        ...

    def facts(self) -> Mapping[str, int | str]:
        """Return facts about the model for a report: `parameters` and `trainable_parameters` (counts), `device`.

        If the model cannot read packed rows, `reads` says what it reads instead. If fused kernels compute parts of the
        model, `kernels` names the parts. If its config asks for dropout or noise, `draws` names the settings. If a GPU
        computes attention on padded rows, `pads` says why.
        """
        ...

    def save(self, path: Path) -> Mapping[str, FileDigest]:
        """Write model, optimizer, scheduler and RNG state into this empty folder, without pickle.

        Returns the digests of files that the backend has hashed and forced to disk itself, by path in the folder. The
        caller hashes and syncs all other files.
        """
        ...

    def load(self, path: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
        """Restore the state that `save` wrote, even on a different number of ranks.

        If the facts say `verifies_files`, each file in `digests` is verified before anything changes. Raises
        CheckpointError if the state does not fit or a file is damaged.
        """
        ...

    def close(self) -> None:
        """End all processes and free device memory."""
        ...


@runtime_checkable
class TakesSnapshots(Protocol):
    """A backend that can be saved while training goes on. Its facts say `takes_snapshots`."""

    def snapshot(self) -> Callable[[Path], Mapping[str, FileDigest]]:
        """Copy the state to the host's memory, and return a function that writes it as `save` does.

        The function may be called once, on another thread, while the backend is used. Take the next snapshot
        only after this one was written or given up, since both use the same memory. Raises RunFailedError if the host
        has too little memory.
        """
        ...


@runtime_checkable
class LendsParameters(Protocol):
    """A backend whose trained parameters can be read, and replaced for a while. Its facts say `lends_parameters`.

    Parameters have the model's own names. If adapters are trained, only the adapters' parameters are lent.
    `trained_parameters` and `swapped` raise ModelError for a role that is not trained.
    """

    @property
    def is_swapped(self) -> bool:
        """Return whether a context of `swapped` is open."""
        ...

    def trained_parameters(self, role: Role = "policy") -> Mapping[str, Tensor]:
        """Return the tensors that the optimizer of this role changes, by name: fp32 master weights if there are any.

        Do not write to these tensors, which are detached. The next optimizer step changes them, so clone what you keep.
        """
        ...

    def swapped(self, role: Role, values: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """Return a context in which parameters of this role have other values. At its end, the old values are restored.

        Values are cast to the parameter's dtype and may be on any device. Logprobs, evaluation, generation and
        `named_weights` use them; `update`, `save` and `load` are refused in the context. Raises ModelError, before
        anything changes, for a name that is not trained or a tensor of another shape.
        """
        ...


@dataclass(frozen=True)
class BackendFacts:
    """Facts about a backend that the rest of a run may ask for before anything is loaded."""

    generates: bool = False
    """True if the backend is a `Generates`, which `evaluation.generate` needs."""
    lends_model: bool = False
    """True if the backend is a `LendsModel`. Engines that generate with the trained model itself need this."""
    lends_parameters: bool = False
    """True if the backend is a `LendsParameters`. Plugins that average weights need this."""
    yields_device: bool = False
    """True if the backend is a `YieldsDevice`. Engines that share the backend's devices need this."""
    takes_snapshots: bool = False
    """True if the backend is a `TakesSnapshots`, which `checkpoint.async` needs."""
    verifies_files: bool = True
    """If True, `load` and the readers below verify the files that the backend hashed, so that ranks can divide the
    work. Otherwise all files are verified when the checkpoint is opened."""
    freezes: bool = False
    """True if the backend supports `model.freeze`."""
    checkpoint_reader: str | None = None
    """`"module:function"` that reads the policy's weights from a checkpoint in one process, so that a model can be
    exported on a machine that cannot train it: `function(run: RunConfig, folder: Path, digests) -> WeightStream` of
    `spurline_models.weight_files`. `folder` and `digests` are as in `load`. Raises CheckpointError. If this is None,
    the backend is built and loads the checkpoint."""
    adapter_reader: str | None = None
    """`"module:function"` that reads the policy's adapter in the same way: `function(run: RunConfig, folder: Path,
    digests) -> AdapterStream` of `spurline_models.adapters.adapter_weights`. If this is None, the
    backend, which must then be a `TrainsAdapters`, is built and loads the checkpoint."""
    stays_on_cpu: bool = False
    """True if the backend trains in this process, on the CPU. If it starts ranks, `rank_request` names their device."""
    replays_experts: bool = False
    """True if the backend's models route tokens to the experts in a batch's column `routed_experts`."""
    balances_experts: bool = False
    """True if the backend supports `model.router_aux_loss`."""
    trains_adapters: bool = False
    """True if adapters are trained instead of all weights."""
    dropout_rates: Mapping[str, float] = field(default_factory=dict[str, float])
    """Dropout rates that the backend itself adds to the model, by key path in the backend's section."""
    computes_in: Literal["fp32", "bf16", "fp64"] = "fp32"
    """Precision of forward passes, and of keys and values if an engine borrows the model."""
    device: str = ""
    """Words about the devices for messages, such as `on cuda, bf16`."""


class BackendConfig(ComponentConfig):
    """Settings of a backend. For Hugging Face models, `spurline_models.backend_config` has a base class."""

    kind: ClassVar[str] = "backend"

    @property
    def facts(self) -> BackendFacts:
        """Return the facts that sections and plugins may ask for."""
        return BackendFacts()

    def layout(self) -> ParallelLayout:
        """Return what the backend's parallelism requires of a batch. The default fits a single process."""
        return ParallelLayout()

    def rank_request(self) -> RankRequest | None:
        """Return the processes that the backend starts, or None if it computes in this process."""
        return None

    def free_after(self, before: Mapping[str, Any]) -> Collection[str]:
        """Return key paths that a resume may change without changing a bit, given the checkpoint's backend section."""
        return ()

    def missing_here(self) -> str | None:
        """Return a sentence on what this machine lacks for these settings, or None if it lacks nothing."""
        return None

    def check_model(self, run: Any) -> None:
        """Raise ConfigError or ModelError if this machine cannot train the model, for example without a library.

        This reads no weights. `spurline plan` calls it, and the backend itself calls it before it starts anything.
        """

    def check_trainable(self, run: Any) -> None:
        """Raise ConfigError or ModelError if no machine can train the model with these settings.

        This reads no weights. `spurline plan` calls it, and a run calls it before it reads its data.
        """

    def check_lengths(
        self, loaded: LoadedView, source: KnowsLongest, evaluations: Sequence[KnowsLongest]
    ) -> Sequence[str]:
        """Return notes about sequences that are long for the model, by default none.

        `spurline plan` and runs call this before weights load. Raises ConfigError for a sequence that is too long.
        """
        return ()

    def notes(self, run: Any) -> Sequence[str]:
        """Return sentences about how the model is computed, for `spurline plan` and the first lines of a run.

        This reads the model's config, but no weights. Raises ModelError if the config cannot be read.
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
        """Write the backend's current weights as files that other tools can load.

        Args:
            backend: The backend that was built from these settings.
            loaded: The config of the run.
            tokenizer: The tokenizer of the model, which is written too.
            path: The folder to write, which is returned.
            replace: Whether to replace content of the folder. If not, the folder must be new or empty.
            adapter: Whether to write the adapter alone.

        Raises:
            UserError: If the backend cannot export, or the folder has content that may not be replaced.
        """
        raise UserError(f"Backend '{self.name}' cannot export. Remove checkpoint.export_hf.")
