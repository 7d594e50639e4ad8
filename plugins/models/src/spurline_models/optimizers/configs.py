"""Settings of the optimizers and schedules. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume
from spurline.errors import Problem
from spurline.protocols.optimizer import OptimizerConfig, num_values
from spurline.protocols.schedule import ScheduleConfig

Share = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(OptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with a fused kernel."""

    needs_whole_parameters: ClassVar[str | None] = None
    is_elementwise: ClassVar[bool] = True
    steps_apart: ClassVar[bool] = True

    name: str = "adamw"
    betas: Annotated[tuple[Share, Share], OnResume.BY_NAME] = (0.9, 0.95)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, OnResume.BY_NAME] = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""


class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent, with weight decay in the gradient. It needs far larger learning rates than AdamW."""

    needs_whole_parameters: ClassVar[str | None] = None
    is_elementwise: ClassVar[bool] = True
    steps_apart: ClassVar[bool] = True

    name: str = "sgd"
    momentum: Annotated[Share, OnResume.BY_NAME] = 0.0
    """Share of the previous step's direction that is added to the gradient. With 0, the optimizer has no state."""

    def state_bytes(self, shapes: Mapping[str, Sequence[int]], weight_bytes: int) -> int:
        return weight_bytes * num_values(shapes) if self.momentum else 0


class MuonConfig(AdamWConfig):
    """Muon for matrices of hidden layers (Jordan et al. 2024, kellerjordan.github.io/posts/muon), AdamW for the rest.

    AdamW trains embeddings, the output layer, vectors, and tensors of three or more dimensions. `betas` and `eps`
    are settings of AdamW.
    """

    is_elementwise: ClassVar[bool] = False

    name: str = "muon"
    momentum: Annotated[Share, OnResume.BY_NAME] = 0.95
    """Share of the previous step's direction that is kept."""
    adjust_learning_rate: Annotated[Literal["match_rms_adamw", "original"], OnResume.BY_NAME] = "match_rms_adamw"
    """How the learning rate of a matrix depends on its shape. `match_rms_adamw` multiplies it by 0.2 sqrt(max(rows,
    columns)), so that the learning rate and weight decay of AdamW suit all parameters (Liu et al. 2025,
    arXiv:2502.16982). `original` multiplies it by sqrt(max(1, rows / columns)), and needs a learning rate such as 0.02.
    With `original`, put the parameters that AdamW trains into a group with a smaller rate."""
    adamw_matrices: tuple[str, ...] = ("*embed*", "*wte*", "*wpe*", "*lm_head*", "*output_layer*")
    """Glob patterns of the matrices that AdamW trains: embeddings and the output layer."""

    def is_hidden_matrix(self, name: str, shape: Sequence[int]) -> bool:
        """Return whether Muon trains this parameter; AdamW trains the others."""
        return len(shape) == 2 and not any(fnmatchcase(name, pattern) for pattern in self.adamw_matrices)

    def state_bytes(self, shapes: Mapping[str, Sequence[int]], weight_bytes: int) -> int:
        hidden = {name: shape for name, shape in shapes.items() if self.is_hidden_matrix(name, shape)}
        return weight_bytes * (2 * num_values(shapes) - num_values(hidden))


class AdamW8BitConfig(AdamWConfig):
    """AdamW with moments in 8 bits and a scale for each block (Dettmers et al. 2022, arXiv:2110.02861).

    It needs `pip install spurline-models[optim-8bit]`. Small parameters have moments in 32 bits.
    """

    needs_whole_parameters: ClassVar[str | None] = "the kernels of bitsandbytes take no DTensors"
    is_elementwise: ClassVar[bool] = False

    retired: ClassVar[tuple[str, ...]] = ("paged",)

    name: str = "adamw_8bit"
    smallest: int = Field(default=4096, ge=1)
    """Parameters with fewer values have moments in 32 bits."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if find_spec("bitsandbytes") is None:
            yield Problem(
                "name", f"is {self.name}, which needs bitsandbytes. Run `pip install spurline-models[optim-8bit]`."
            )
        if run.backend.facts.computes_in == "fp64":
            yield Problem(
                "name", f"is {self.name}, which has no kernel for float64. Use adamw, or backend.precision: fp32."
            )

    def state_bytes(self, shapes: Mapping[str, Sequence[int]], weight_bytes: int) -> int:
        # Each of the two moments has a 4-byte scale per 256 values, and one table of 256 floats for all parameters.
        sizes = [math.prod(shape) for shape in shapes.values()]
        large = [size for size in sizes if size >= self.smallest]
        tables = 2 * 4 * 256 if large else 0
        return sum(2 * (size + 4 * math.ceil(size / 256)) for size in large) + 8 * (sum(sizes) - sum(large)) + tables


class ConstantConfig(ScheduleConfig):
    """The peak learning rate in all steps after warm-up."""

    name: str = "constant"


class DecayingConfig(ScheduleConfig):
    """Settings of schedules that end below the peak."""

    min_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of the decay, as a share of the peak. The rate of the last step is slightly above it."""


class LinearConfig(DecayingConfig):
    """A straight line from the peak to `min_ratio`, over all steps after warm-up."""

    name: str = "linear"


class CosineConfig(DecayingConfig):
    """Half a period of a cosine from the peak to `min_ratio`, over all steps after warm-up."""

    name: str = "cosine"


class WsdConfig(DecayingConfig):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395): the peak, then a linear decay in the last steps.

    If a run is extended before its decay begins, it continues at the peak.
    """

    name: str = "wsd"
    decay_ratio: float = Field(default=0.1, ge=0, le=1)
    """Length of the decay as a share of all optimizer steps, if `decay_steps` is not given."""
    decay_steps: int | None = Field(default=None, ge=0)
    """Length of the decay at the end of the run, in optimizer steps."""

    def decay(self, total: int) -> int:
        """Return the number of decay steps in a run of `total` optimizer steps. Decay never overlaps warm-up."""
        wanted = self.decay_steps if self.decay_steps is not None else math.ceil(self.decay_ratio * total)
        return min(wanted, max(0, total - self.warmup(total)))
