"""Config sections of core's own components. Light: imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from spurline.config.run_config import DatasetConfig, RunConfig
from spurline.config.section import ComponentConfig, OnResume, Section
from spurline.errors import Problem
from spurline.protocols.backend_config import BackendConfig
from spurline.protocols.source_config import PromptSourceConfig
from spurline.registry import resolve


class HfDatasetConfig(DatasetConfig):
    """Rows that Hugging Face `datasets` can load: local files and folders, or a hub name."""

    name: str = "hf"
    path: Annotated[str, OnResume.FREE] = Field(min_length=1)
    """A .jsonl, .json, .parquet, .arrow or .csv file, a folder of such files or of `save_to_disk`, or a hub name."""
    subset: str | None = None
    """Configuration name of a hub dataset."""
    split: str = "train"
    """Split string, such as `train`, `train[:1000]` or `train[10%:20%]`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""


class SequentialTokenizationConfig(ComponentConfig):
    """One sample after another, in this process, into memory."""

    name: str = "sequential"


class PaddedCollatorConfig(ComponentConfig):
    """One sample per row, padded to the longest."""

    name: str = "padded"
    pad_side: Literal["right", "left"] = "right"
    """Side on which shorter rows are filled."""
    pad_to_multiple_of: int = Field(default=1, gt=0)
    """Round the row length up to a multiple of this."""


class PackedCollatorConfig(ComponentConfig):
    """Several samples per row; no sample sees its neighbour."""

    name: str = "packed"
    max_tokens: int = Field(default=8192, gt=0)
    """Tokens in one packed row, padding and alignment included."""
    align_to: int = Field(default=1, gt=0)
    """Round each sample's length up to a multiple of this; the backend's own alignment is applied on top."""
    pad_to_max: bool = False
    """Make every row exactly `max_tokens` long; otherwise rows are as long as the fullest one."""
    algorithm: Literal["ffd", "bfd", "multifit"] = "ffd"
    """First-fit-decreasing; best-fit-decreasing; or first-fit-decreasing with rows evened out over all ranks."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if run.collator is self and run.data.max_length > self.max_tokens:
            yield Problem(
                "max_tokens",
                f"is {self.max_tokens}, but data.max_length allows samples of {run.data.max_length} tokens. "
                f"Set data.max_length: {self.max_tokens}, or raise collator.max_tokens.",
            )


class RolloutsCollatorConfig(PaddedCollatorConfig):
    """One turn of a trajectory per row."""

    name: str = "rollouts"


class SerialPrefetchConfig(ComponentConfig):
    """Build each batch when its step begins, on the loop's thread."""

    name: str = "serial"


class WholeBatchConfig(ComponentConfig):
    """One optimizer step per batch."""

    name: str = "whole"


class RolloutSourceConfig(PromptSourceConfig):
    """Synchronous reinforcement learning: each step generates with the weights of the step before."""

    name: str = "rollouts"


class ByPromptConfig(ComponentConfig):
    """Cut a batch of rollouts into optimizer steps of whole prompts."""

    name: str = "by_prompt"
    prompts_per_minibatch: int | None = Field(default=None, gt=0)
    """Prompts in one optimizer step; null takes all of the step's."""
    update_epochs: int = Field(default=1, gt=0)
    """Passes over the batch."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        source = run.source
        if not isinstance(source, PromptSourceConfig):
            yield Problem(
                "name",
                f"is by_prompt, but the source '{source.name}' draws no prompts. Choose a source of rollouts, or "
                "minibatches: whole.",
            )
        elif self.prompts_per_minibatch is not None and source.prompts_per_step % self.prompts_per_minibatch:
            yield Problem(
                "prompts_per_minibatch",
                f"is {self.prompts_per_minibatch}, which does not divide source.prompts_per_step: "
                f"{source.prompts_per_step}. Choose a divisor.",
            )


class CrossEntropyConfig(ComponentConfig):
    """Negative log-likelihood, the usual loss of supervised fine-tuning."""

    name: str = "cross_entropy"


class DynamicFineTuningConfig(ComponentConfig):
    """Cross-entropy weighted by the token's own probability (DFT, Wu et al. 2025, arXiv:2508.05629)."""

    name: str = "dft"


class SftSourceConfig(ComponentConfig):
    """Tokenized samples in an order that depends only on seed and epoch."""

    name: str = "sft"


class LoraConfig(Section):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685) through peft; needs `pip install spurline[lora]`."""

    rank: int = Field(default=16, gt=0)
    """Rank of the update matrices."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the update is alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Module names to adapt."""


class LocalBackendConfig(BackendConfig):
    """One process, on CPU or one GPU."""

    name: str = "local"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes the GPU when there is one."""
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"
    """`bf16` keeps fp32 weights and computes under autocast; `fp64` is for numerical tests."""
    rows_per_microbatch: int | None = Field(default=None, gt=0)
    """Accumulate gradients over micro-batches of this many rows; null takes all rows at once."""
    max_tokens_per_microbatch: int | None = Field(default=None, gt=0)
    """Or fill each micro-batch with whole rows up to this many tokens, padding not counted."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: bool = False
    """Run the decoder through torch.compile."""
    logits_chunk_tokens: int = Field(default=4096, gt=0)
    """Positions whose logits exist at the same time."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
    num_threads: Annotated[int | None, OnResume.FREE] = Field(default=None, gt=0)
    """CPU threads; null leaves torch's choice."""
    probe: bool = True
    """Check at start-up that packed rows and chunked logits are exact for this model."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        if self.rows_per_microbatch is not None and self.max_tokens_per_microbatch is not None:
            yield Problem("rows_per_microbatch", "and max_tokens_per_microbatch exclude each other. Remove one.")

    def missing_here(self) -> str | None:
        # By name, as factories are: only torch knows about GPUs, and a config must not import it.
        has_gpu = resolve("torch.cuda:is_available", "GPU check of backend 'local'")()
        if self.device == "cuda" and not has_gpu:
            return "backend.device is cuda, but torch sees no GPU here: this config trains elsewhere only"
        return None

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        if self.rows_per_microbatch is not None:
            tokens = min(tokens, self.rows_per_microbatch * row_length)
        # By name, as factories are: the estimate builds the architecture with torch, which a config must not import.
        estimate = resolve("spurline.builtin.local.memory:estimate_memory", "memory estimate of backend 'local'")
        return estimate(run, self, min(tokens, self.max_tokens_per_microbatch or tokens))


class JsonlTrackerConfig(ComponentConfig):
    """RUN_DIR/metrics.jsonl, one object per step; always on."""

    name: str = "jsonl"


class ConsoleTrackerConfig(ComponentConfig):
    """Progress on the terminal: a live bar, or plain lines when output is not a terminal; always on."""

    name: str = "console"
    every_steps: int = Field(default=10, gt=0)
    """Plain lines: print one each time this many steps are done."""


class TensorboardTrackerConfig(ComponentConfig):
    """TensorBoard event files in RUN_DIR/tensorboard; needs `pip install spurline[tensorboard]`."""

    name: str = "tensorboard"


class WandbTrackerConfig(ComponentConfig):
    """Weights & Biases; needs `pip install spurline[wandb]`. A resumed run continues the same W&B run."""

    name: str = "wandb"
    project: str = "spurline"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""
    run_name: str | None = None
    """Display name; default is the run directory's name."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """`offline` writes locally, to be synced later."""


class ExactMatchConfig(ComponentConfig):
    """1 when the response equals the reference text, white space at both ends ignored; else 0."""

    name: str = "exact_match"
    ignore_case: bool = False
    """Compare without regard to case."""


class ReportPanelConfig(ComponentConfig):
    """A panel of the HTML report, without settings."""
