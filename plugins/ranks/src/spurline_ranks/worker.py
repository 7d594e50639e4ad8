"""The calls of a rank that do not depend on how a model is divided: weights that leave it, and files to verify.

A backend's rank inherits them and adds the others that `spurline_ranks.backend` calls. Every method is a collective:
all ranks run it with the same common arguments, and make the same exchanges in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from spurline.digests import FileDigest, verify_files
from spurline.errors import CheckpointError, CheckpointWriteError
from spurline_models.placement.offloading import DeviceMemory, DeviceTensors
from spurline_ranks.group import Place
from spurline_ranks.messages import SavedPart
from spurline_ranks.publishing import Publishing
from spurline_ranks.weight_gathering import Bucket, WeightGathering, as_arrays


class RankWorker:
    """A base of a `Worker`, which sets the attributes `_memory`, and once its models are built `_gathering` and
    `_publishing`.

    It is made with (place, plain run, total updates), and adds these calls, in which a wire is a `RankShare.to_wire`:

    - build(): loads the models. Errors of a user are raised on all ranks alike.
    - update(wire, plain objective, role): a dict of `loss` (sum of weight * loss of all ranks), `grad_norm`, `finite`
      (whether both are; without, nothing has changed), `updates` so far, `rates` as of `Optimization.step`, `part` (the
      `SumsPart` of a rank that counts, else anything), `expert_loads` of the rank, and the seconds
      `time/forward_backward` and `time/optimizer`. Of all but the last four, the first rank's are used.
    - gradients(wire, plain objective, role): (name, whole gradient) of each trained parameter, from the first rank.
    - evaluate(wire, plain objective): a `SumsPart` of a rank that counts.
    - logprobs(wire, role, temperature): float32 values of the share, from a rank that counts; see `Dealing.gather`.
    - load(path): takes over a checkpoint. A CheckpointError of what does not fit is returned, on all ranks, with
      nothing changed; None when it was taken.
    - facts(): see `Backend.facts`; from the first rank.
    """

    _place: Place
    _gathering: WeightGathering
    _publishing: Publishing
    _memory: DeviceMemory

    def gathering_plan(self) -> list[Bucket]:
        """See `WeightGathering.buckets`."""
        return list(self._gathering.buckets())

    def weights(self, bucket: Bucket) -> list[tuple[str, NDArray[Any]]] | None:
        """(hf_name, whole tensor) of these weights of the policy, from the first rank."""
        whole = self._gathering.gather(bucket)
        return as_arrays(whole.items()) if self._place.rank == 0 else None

    def write_weights(self, folder: str, dtype: str, max_file_bytes: int) -> str | None:
        """See `Backend.write_weights`; why this rank could not write, if it could not. dtype: its name in torch."""
        failure = self._gathering.write(Path(folder), getattr(torch, dtype), max_file_bytes, self._place.doing)
        return None if failure is None else self._named(failure)

    def num_buckets(self, choice: Mapping[str, Any]) -> int:
        """See `Publishing.num_buckets`."""
        return self._publishing.num_buckets(choice)

    def make_bucket(self, choice: Mapping[str, Any], version: int, number: int) -> dict[str, Any] | None:
        """See `Publishing.make`."""
        return self._publishing.make(choice, version, number)

    def bucket_taken(self) -> None:
        """See `Publishing.taken`."""
        self._publishing.taken()

    def yield_device(self, keep_weights: bool) -> None:
        """See `YieldsDevice`."""
        self._place.doing("moving what it keeps to the memory of the host")
        self._memory.give(self._device_tensors(), keep_weights=keep_weights)

    def take_device(self) -> None:
        """See `YieldsDevice`."""
        self._place.doing("taking the memory of its device back")
        self._memory.take()

    def save(self, path: str) -> SavedPart:
        """Write this rank's part of all models that are trained."""
        self._place.doing("writing a checkpoint")
        try:
            return SavedPart(self._save(Path(path)))
        except CheckpointWriteError as error:
            return SavedPart({}, self._named(error))

    def verify(self, digests: Mapping[str, FileDigest], path: str) -> CheckpointError | None:
        """What is wrong with these files, if anything is."""
        self._place.doing(f"verifying {len(digests)} files of a checkpoint")
        try:
            verify_files(Path(path), digests)
        except CheckpointError as error:
            return error
        return None

    def _save(self, path: Path) -> Mapping[str, FileDigest]:
        """Write what this rank holds into the folder; digests by path in it. Raises CheckpointWriteError."""
        raise NotImplementedError

    def _device_tensors(self) -> DeviceTensors:
        """What this rank has on its device between two updates. Exchanges nothing."""
        raise NotImplementedError

    def _named(self, failure: Exception) -> str:
        return f"rank {self._place.rank} on {self._place.node}: {failure}"
