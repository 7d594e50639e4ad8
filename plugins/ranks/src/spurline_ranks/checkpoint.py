"""Checkpoints as all backends with ranks write them: pieces of tensors, and facts beside them.

A folder for each model that is trained, `policy` and `critic`, has the pieces of all ranks (`spurline_ranks.pieces`):
weights under their names in the Hugging Face model, the optimizer's tensors under NAME/KEY. The first rank writes
`state.json`: the update count, digests of the initial and of the frozen weights, the names of the weights, the
optimizer's name and numbers, and how the ranks were divided. Random generators are seeded again in each step, and have
no state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.config.run_config import RunConfig
from spurline.digests import FileDigest, verify_files
from spurline.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError
from spurline.protocols.backend import Role
from spurline_models.adapters.adapter_weights import AdapterStream
from spurline_models.configs import LoraConfig
from spurline_models.optimizers.state import OptimizerState
from spurline_models.saved_state import check_frozen, check_weights, read_facts, write_facts
from spurline_models.saved_weights import SavedTensors, saved_adapter, saved_weights
from spurline_models.weight_files import WeightStream
from spurline_models.weights import digest_of_samples, sampled_positions
from spurline_ranks.pieces import Box, Piece, PieceIndex, write_pieces

_POLICY: Role = "policy"


@dataclass(frozen=True)
class StoredModel:
    """The content of a model's folder, from its headers; values are read when they are put into place."""

    backend: ClassVar[str]
    """The name of the backend whose ranks wrote it."""

    index: PieceIndex
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the headers of a folder. Raises CheckpointError if another backend wrote it, or it is damaged."""
        facts = read_facts(folder, cls.backend, cls._format())
        index = PieceIndex.of(folder)
        lost = [name for name in facts.get("weights", ()) if name not in index.tensors]
        if lost:
            raise DamagedCheckpointError(
                f"{folder} is damaged: {len(lost)} weights, such as {lost[0]}, are in no file, so one is missing. "
                "Resume from another checkpoint."
            )
        return cls(index, facts)

    @classmethod
    def read_fitting(cls, path: Path, models: Mapping[Role, Any]) -> dict[Role, Self]:
        """Read the headers of a checkpoint, and check that all of it fits these models; nothing is changed.

        A collective: the first rank reads, as headers are the same for all.

        Raises:
            CheckpointError: The first that a rank finds, on all ranks alike.
        """
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                found = [{role: cls.of(path / role) for role in models}]
            except CheckpointError as error:
                found = [error]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], CheckpointError):
            raise found[0]
        saved: dict[Role, Self] = found[0]
        failure: CheckpointError | None = None
        try:
            for role, trained in models.items():
                saved[role].check(trained)
        except CheckpointError as error:
            failure = error
        # Ranks may hold other parameters, and an optimizer may have other groups of them.
        failures: list[CheckpointError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        for failure in failures:
            if failure is not None:
                raise failure
        return saved

    def check(self, trained: Any) -> None:
        """Raise CheckpointError unless it fits a model of this rank and its optimizer; changes nothing."""
        raise NotImplementedError

    def put_into(self, trained: Any) -> None:
        """Read the values into a model of this rank and its optimizer, which it fits."""
        raise NotImplementedError

    @classmethod
    def write(
        cls, folder: Path, rank: int, facts: Mapping[str, Any] | None, pieces: Iterable[Piece]
    ) -> dict[str, FileDigest]:
        """Write the pieces of a rank, and the facts of the first one; return digests by path beside the folder.

        Raises CheckpointWriteError.
        """
        try:
            folder.mkdir(exist_ok=True)
            if facts is not None:
                write_facts(folder, {"format": cls._format(), **facts})
        except OSError as error:
            raise CheckpointWriteError(str(error)) from error
        return {f"{folder.name}/{name}": digest for name, digest in write_pieces(folder, rank, pieces).items()}

    @property
    def weights(self) -> list[str]:
        """Names of the weights and buffers, without what belongs to the optimizer."""
        return [key for key in self.index.tensors if "/" not in key]

    @property
    def optimizer_shapes(self) -> dict[str, Tensor]:
        """The optimizer's tensors by NAME/KEY, on device `meta`."""
        return {
            key: torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            for key, stored in self.index.tensors.items()
            if "/" in key
        }

    def check_fits(
        self, weights: Mapping[str, str], frozen_weights: str, check_optimizer: Callable[[OptimizerState], None]
    ) -> None:
        """Raise CheckpointError unless it fits a model that is trained; change nothing.

        Args:
            weights: The `describe` of each weight.
            frozen_weights: The digest of the frozen weights.
            check_optimizer: Raises CheckpointError unless the optimizer can take this state, on device `meta`.
        """
        where = self.index.folder
        check_weights(where, {name: self.index.tensors[name].describe() for name in self.weights}, weights)
        check_frozen(where, self.facts["frozen_weights"], frozen_weights)
        try:
            check_optimizer(OptimizerState.read(self.optimizer_shapes, self.facts["optimizer"]))
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error

    @classmethod
    def read_policy(
        cls,
        run: RunConfig,
        folder: Path,
        digests: Mapping[str, FileDigest],
        lora: LoraConfig | None,
        frozen_dtype: torch.dtype,
    ) -> WeightStream:
        """Read the policy in one process, one whole tensor after the other. See `BackendFacts.checkpoint_reader`.

        The optimizer's values are verified too: they lie in the same files. Ranks hold the weights under adapters in
        `frozen_dtype`.
        """
        return saved_weights(cls._read_saved(folder, digests, frozen_dtype), run.model, lora, run.seed)

    @classmethod
    def read_adapter(
        cls, run: RunConfig, folder: Path, digests: Mapping[str, FileDigest], lora: LoraConfig
    ) -> AdapterStream:
        """Read the adapter alone, as `read_policy` does. See `BackendFacts.adapter_reader`."""
        # The dtype of the frozen weights does not matter: adapters are in fp32.
        return saved_adapter(cls._read_saved(folder, digests, torch.float32), run.model, lora, run.seed)

    @classmethod
    def _read_saved(cls, folder: Path, digests: Mapping[str, FileDigest], frozen_dtype: torch.dtype) -> SavedTensors:
        """Open the policy's tensors; each is read whole when it is asked for."""
        verify_files(folder, {name: digest for name, digest in digests.items() if name.startswith(f"{_POLICY}/")})
        stored = cls.of(folder / _POLICY)
        tensors = stored.index.tensors

        def read(name: str) -> Tensor:
            return stored.index.read(name, Box.whole(tensors[name].shape))

        layout = {
            name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in stored.weights
        }
        return SavedTensors(folder / _POLICY, layout, read, stored.facts["frozen_weights"], frozen_dtype)

    @classmethod
    def _format(cls) -> str:
        return f"{cls.backend}-1"


def digest_of_ranks(
    tensors: Mapping[str, Tensor], held: Iterable[tuple[str, Box, Tensor]], device: torch.device
) -> str:
    """Return the `digest_of_samples` of tensors that are divided among ranks, without gathering one. A collective.

    Args:
        tensors: Whole ones by name, for shape and dtype only; the same on all ranks, in the same order.
        held: The boxes that this rank holds: name, box and values.
        device: The device that ranks exchange from.
    """
    if not tensors:
        return digest_of_samples([])
    positions = {name: sampled_positions(tensor.numel()) for name, tensor in tensors.items()}
    found = {
        name: torch.zeros(len(sampled), dtype=tensors[name].dtype, device=device) for name, sampled in positions.items()
    }
    for name, box, values in held:
        places = torch.stack(torch.unravel_index(positions[name], tensors[name].shape))
        places -= torch.tensor(box.offset)[:, None]
        mine = ((places >= 0) & (places < torch.tensor(box.shape)[:, None])).all(0)
        sampled = values.detach()[tuple(places[:, mine].to(values.device))]
        found[name][mine.to(device)] = sampled.to(device, tensors[name].dtype)
    # Ranks without a value put in zeros, so the largest byte is that of a rank that has it.
    joined = torch.cat([values.view(torch.uint8) for values in found.values()])
    dist.all_reduce(joined, dist.ReduceOp.MAX)
    parts = joined.split([values.nbytes for values in found.values()])
    return digest_of_samples(
        (name, tensor, part.clone().view(tensor.dtype))
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    )
