"""The methods of a rank that do not depend on how a model is sharded.

A backend's rank class inherits from `RankWorker` and adds the other methods. The controller calls a method on all ranks
together, with the same common arguments. All ranks make the same exchanges in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest, verify_files
from spurline.errors import CheckpointError, CheckpointWriteError
from spurline.plugins.registry import Registry
from spurline.protocols.backend import Role
from spurline.protocols.loss import Objective
from spurline_models.accumulate import Number, SumsPart
from spurline_models.dealing import RankShare
from spurline_models.device_profile import DeviceProfile, device_profile
from spurline_models.placement.offloading import DeviceMemory, DeviceTensors
from spurline_models.weight_buckets import PublishedPart
from spurline_models.weights import PinnedWeights
from spurline_ranks.checkpoint import StoredModel
from spurline_ranks.group import Place
from spurline_ranks.messages import read_objective
from spurline_ranks.publishing import Publishing
from spurline_ranks.weight_gathering import Bucket, WeightGathering, as_arrays

Wire = Mapping[str, Any]
"""A share of a batch as plain data: see `RankShare.to_wire`."""

_CLIP_EPSILON = 1e-6
"""The epsilon of torch.nn.utils.clip_grad_norm_, which the local backend uses."""


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks: the gradient norm, and the sum of weight * loss."""

    grad_norm: float
    loss: float

    @classmethod
    def of(cls, squares: Tensor, loss: Number) -> StepTotals:
        """Sum over all ranks, which must call this together. Each gradient and token is counted by one rank.

        Args:
            squares: The sum of squares of the gradients that this rank counts; a float64 scalar.
            loss: The sum of weight * loss of the tokens that this rank counts.
        """
        sums = squares.new_tensor([0.0, float(loss)])
        sums[0] = squares
        dist.all_reduce(sums)
        total, joined = sums.tolist()
        return cls(math.sqrt(total), joined)

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.grad_norm) and math.isfinite(self.loss)


def clip_factor(grad_norm: float, limit: float | None) -> float | None:
    """Return the factor that scales gradients down to the norm `limit`, or None if their norm is not larger."""
    return limit / (grad_norm + _CLIP_EPSILON) if limit is not None and grad_norm > limit else None


class RankWorker:
    """The base class of a backend's worker. Every rank makes one worker.

    A subclass sets `_saved_model`, `_counts` in its constructor, and the other attributes in `build`. It adds methods:

    - build(): loads the models. It is the first call.
    - gradients(wire, plain objective, role): returns (name, whole gradient) of each trained parameter on the first
      rank. It changes nothing.
    - evaluate(wire, plain objective): returns the `SumsPart` on ranks with `_counts`.
    - logprobs(wire, role, temperature): returns float32 values for `Dealing.gather` on ranks with `_counts`.
    - facts(): returns `Backend.facts` on the first rank.
    """

    _saved_model: ClassVar[type[StoredModel]]
    _gatherings: Mapping[str, WeightGathering]
    """Gather weights of the policy. `model` gathers all weights, `adapter` only the adapter, if there is one."""
    publishing: Publishing
    """Makes buckets. The controller calls its methods, such as `publishing.num_buckets`."""
    _policy: Any
    """This rank's part of the policy, with its optimizer."""
    _critic: Any = None
    """This rank's part of the critic, if there is one, with its optimizer."""
    _counts: bool
    """Whether this rank returns sums and logprobs. Only one of the ranks that compute the same rows returns them."""

    def __init__(self, place: Place, run: RunConfig, registry: Registry, total_updates: int) -> None:
        self._place, self._run, self._registry, self._total = place, run, registry, total_updates
        self._config: Any = run.backend
        self._profile: DeviceProfile = device_profile(self._config.on)
        self._memory = DeviceMemory(self._profile)
        if self._config.deterministic:
            torch.use_deterministic_algorithms(True)

    def update(self, wire: Wire, plain_objective: Mapping[str, Any], role: Role) -> dict[str, Any]:
        """Take one optimizer step, or change nothing if loss or gradient norm are not finite.

        Returns:
            `loss` is the sum of weight * loss over all ranks, `updates` is the number of optimizer steps so far,
            `rates` are the metrics of `Optimization.step`, and `part` is the `SumsPart`, or None on ranks without
            `_counts`. Times are in seconds.
        """
        trained = self._trained[role]
        started = time.perf_counter()
        try:
            part = self._accumulate(role, RankShare.from_wire(wire), read_objective(plain_objective, self._registry))
            self._place.doing("joining the gradient norm of all ranks")
            totals = trained.totals(part.loss if self._counts else 0)
            differentiated = time.perf_counter()
            self._place.doing("the optimizer's step")
            rates = trained.step(totals.grad_norm) if totals.is_finite else {}
            self._profile.synchronize()
        finally:
            self._drop_gradients(role)
        return {
            "grad_norm": totals.grad_norm,
            "loss": totals.loss,
            "finite": totals.is_finite,
            "updates": trained.updates,
            "rates": rates,
            "part": part if self._counts else None,
            "expert_loads": part.expert_loads,
            "time/forward_backward": differentiated - started,
            "time/optimizer": time.perf_counter() - differentiated,
        }

    def load(self, path: str) -> CheckpointError | None:
        """Read a checkpoint into the models. If it does not fit, return the error on all ranks and change nothing.

        Raises:
            CheckpointError: If values cannot be read. The models are then changed in part.
        """
        self._place.doing("reading a checkpoint")
        try:
            saved = self._saved_model.read_fitting(Path(path), self._trained)
        except CheckpointError as error:
            return error
        for role, trained in self._trained.items():
            saved[role].put_into(trained)
            trained.updates = int(saved[role].facts["updates"])
            trained.pinned = PinnedWeights.read(saved[role].facts)
        return None

    def gathering_plan(self, part: PublishedPart) -> list[Bucket]:
        return list(self._gatherings[part].buckets()) if part in self._gatherings else []

    def weights(self, part: PublishedPart, bucket: Bucket) -> list[tuple[str, NDArray[Any]]] | None:
        """Gather the weights of a bucket. Return (name in files, whole tensor) pairs on the first rank, else None."""
        whole = self._gatherings[part].gather(bucket)
        return as_arrays(whole.items()) if self._place.rank == 0 else None

    def write_weights(self, folder: str, dtype: torch.dtype, max_file_bytes: int) -> OSError | None:
        """Write whole weights as in `Backend.write_weights`. Return the error of this rank, or None."""
        failure = self._gatherings["model"].write(Path(folder), dtype, max_file_bytes, self._place.doing)
        return None if failure is None else OSError(self._named(failure))

    def yield_device(self, keep_weights: bool) -> None:
        self._place.doing("moving tensors to host memory")
        self._memory.give(self._device_tensors(), keep_weights=keep_weights)

    def take_device(self) -> None:
        self._place.doing("moving tensors back to the device")
        self._memory.take()

    def save(self, path: str) -> Mapping[str, FileDigest] | CheckpointWriteError:
        """Write this rank's part of all trained models. Return digests by path, or the error."""
        self._place.doing("writing a checkpoint")
        try:
            return self._save(Path(path))
        except CheckpointWriteError as error:
            return CheckpointWriteError(self._named(error))

    def verify(self, digests: Mapping[str, FileDigest], path: str) -> CheckpointError | None:
        """Compare files with their digests. Return the error, or None if all files are unchanged."""
        self._place.doing(f"verifying {len(digests)} files of a checkpoint")
        try:
            verify_files(Path(path), digests)
        except CheckpointError as error:
            return error
        return None

    @property
    def _trained(self) -> dict[Role, Any]:
        return {"policy": self._policy, **({} if self._critic is None else {"critic": self._critic})}

    def _accumulate(self, role: Role, share: RankShare, objective: Objective) -> SumsPart:
        """Compute gradients, summed over the rows of all ranks. Return the sums of this rank's own rows."""
        raise NotImplementedError

    def _drop_gradients(self, role: Role) -> None:
        """Free the gradients after an update."""

    def _save(self, path: Path) -> Mapping[str, FileDigest]:
        """Write this rank's part into the folder, and return digests by path. Raises CheckpointWriteError."""
        raise NotImplementedError

    def _device_tensors(self) -> DeviceTensors:
        """Return the tensors on this rank's device between two updates."""
        weights, state, scratch = list(self._frozen_tensors()), list[Tensor](), list[Tensor]()
        for trained in self._trained.values():
            tensors: DeviceTensors = trained.tensors()
            weights += tensors.weights
            state += tensors.state
            scratch += tensors.scratch
        return DeviceTensors(weights, state, scratch)

    def _frozen_tensors(self) -> Sequence[Tensor]:
        """Return the tensors of the untrained models that are loaded."""
        raise NotImplementedError

    def _named(self, failure: Exception) -> str:
        return f"rank {self._place.rank} on {self._place.node}: {failure}"
