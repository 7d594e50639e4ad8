"""Write and read the checkpoints of backends with ranks.

Each trained model, `policy` or `critic`, has a folder with the pieces of all ranks (`spurline_ranks.pieces`). Weights
are stored under their names in the Hugging Face model, and the optimizer's tensor KEY for a weight NAME under NAME/KEY.
The first rank writes `state.json`: the number of updates, digests of the initial and the frozen weights, the names of
the weights, the optimizer's name and values that are not tensors, and the layout of the ranks. Random generators are
seeded in each step, so their state is not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor

from spurline.digests import FileDigest, verify_files
from spurline.errors import CheckpointError, CheckpointWriteError, DamagedCheckpointError
from spurline.protocols.backend import Role
from spurline_models.optimizers.state import OptimizerState, describe
from spurline_models.saved_weights import SavedTensors, check_frozen, check_weights, read_facts, write_facts
from spurline_models.weights import digest_of_samples, sampled_positions
from spurline_ranks.pieces import Box, Piece, PieceIndex, write_pieces


@dataclass(frozen=True)
class StoredModel:
    """The folder of a model in a checkpoint. `of` reads only headers. `put_into` and `read_saved` read values."""

    backend: ClassVar[str]
    """The name of the backend that writes such folders."""

    index: PieceIndex
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Read the headers. Raises CheckpointError if files are damaged, or if another backend wrote them."""
        facts = read_facts(folder, cls.backend, cls._format())
        index = PieceIndex.of(folder)
        lost = [name for name in facts.get("weights", ()) if name not in index.tensors]
        if lost:
            raise DamagedCheckpointError(
                f"{folder} is damaged: {len(lost)} weights, such as {lost[0]}, are in no file. Resume from another "
                "checkpoint."
            )
        return cls(index, facts)

    @classmethod
    def read_fitting(cls, path: Path, models: Mapping[Role, Any]) -> dict[Role, Self]:
        """Read the headers of a checkpoint, and check that it fits these models. All ranks must call this together.

        Raises:
            CheckpointError: If any rank finds a problem. All ranks raise it.
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
        # Ranks may hold different parameters, so they may find different problems.
        failures: list[CheckpointError | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, failure)
        for failure in failures:
            if failure is not None:
                raise failure
        return saved

    def check(self, trained: Any) -> None:
        """Raise CheckpointError unless the checkpoint fits this rank's model and optimizer."""
        raise NotImplementedError

    def put_into(self, trained: Any) -> None:
        """Load the values into this rank's model and optimizer. Call `check` first."""
        raise NotImplementedError

    @classmethod
    def write(
        cls, folder: Path, rank: int, facts: Mapping[str, Any] | None, pieces: Iterable[Piece]
    ) -> dict[str, FileDigest]:
        """Write a rank's pieces, and the facts unless they are None.

        Returns:
            Digests by path. Paths begin with the name of the folder.

        Raises:
            CheckpointWriteError: If files cannot be written.
        """
        try:
            folder.mkdir(exist_ok=True)
            if facts is not None:
                write_facts(folder, {"format": cls._format(), **facts})
            written = write_pieces(folder, rank, pieces)
        except OSError as error:
            raise CheckpointWriteError(str(error)) from error
        return {f"{folder.name}/{name}": digest for name, digest in written.items()}

    @property
    def weights(self) -> list[str]:
        """Names of the weights and buffers."""
        return [key for key in self.index.tensors if "/" not in key]

    @property
    def optimizer_shapes(self) -> dict[str, Tensor]:
        """The optimizer's tensors by NAME/KEY, on device `meta`: shapes and dtypes without values."""
        return {key: stored.on_meta for key, stored in self.index.tensors.items() if "/" in key}

    def check_fits(
        self, weights: Mapping[str, str], frozen_weights: str, check_optimizer: Callable[[OptimizerState], None]
    ) -> None:
        """Raise CheckpointError unless the checkpoint fits a model.

        Args:
            weights: The result of `optimizers.state.describe` for each weight of the model.
            frozen_weights: The digest of the frozen weights.
            check_optimizer: Raises CheckpointError unless the optimizer can load a state. The state's tensors are on
                device `meta`.
        """
        where = self.index.folder
        check_weights(where, {name: describe(self.index.tensors[name].on_meta) for name in self.weights}, weights)
        check_frozen(where, self.facts["frozen_weights"], frozen_weights)
        try:
            check_optimizer(OptimizerState.read(self.optimizer_shapes, self.facts["optimizer"]))
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error

    @classmethod
    def read_saved(cls, folder: Path, digests: Mapping[str, FileDigest], frozen_dtype: torch.dtype) -> SavedTensors:
        """Open the policy of a checkpoint in a single process. Each tensor is read as a whole.

        `frozen_dtype` is the dtype in which ranks hold frozen weights.
        """
        verify_files(folder, {name: digest for name, digest in digests.items() if name.startswith("policy/")})
        stored = cls.of(folder / "policy")
        tensors = stored.index.tensors

        def read(name: str) -> Tensor:
            return stored.index.read(name, Box.whole(tensors[name].shape))

        layout = {name: tensors[name].on_meta for name in stored.weights}
        return SavedTensors(folder / "policy", layout, read, stored.facts["frozen_weights"], frozen_dtype)

    @classmethod
    def _format(cls) -> str:
        return f"{cls.backend}-1"


def digest_of_ranks(
    tensors: Mapping[str, Tensor], held: Iterable[tuple[str, Box, Tensor]], device: torch.device
) -> str:
    """Return the `digest_of_samples` of sharded tensors without gathering them. All ranks must call this together.

    Args:
        tensors: The unsharded tensors by name, in the same order on all ranks. Their values are not read.
        held: The parts of tensors that this rank holds, as (name, box, values).
        device: The device on which ranks exchange tensors.
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
    # A rank has zeros for values that it does not hold, so the maximum of each byte is the byte of the value.
    joined = torch.cat([values.view(torch.uint8) for values in found.values()])
    dist.all_reduce(joined, dist.ReduceOp.MAX)
    parts = joined.split([values.nbytes for values in found.values()])
    return digest_of_samples(
        (name, tensor, part.clone().view(tensor.dtype))
        for (name, tensor), part in zip(tensors.items(), parts, strict=True)
    )
