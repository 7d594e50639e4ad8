"""Settings of the backend `fsdp`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from spurline.config.paths import PathSetting
from spurline.config.run_config import RunConfig
from spurline.config.section import OnResume, Section
from spurline.errors import Problem
from spurline.model.configs import LoraConfig, check_peft
from spurline.plugins.registry import resolve
from spurline.protocols.backend import BackendConfig, Finding
from spurline.protocols.collator import ParallelLayout
from spurline.ranks.group import Launch, RankRequest, RuntimeEnv, TimeLimits
from spurline.ranks.machine import check_ray, num_gpus

RANKS_ON_CPU = 2
"""How many there are without GPUs, where nothing is said: enough to show that it works."""


class RuntimeEnvConfig(Section):
    """What the processes of a run on a Ray cluster get from this machine; everything else is their machine's own."""

    env_vars: dict[str, str] = {}
    """Environment variables, such as `{NCCL_SOCKET_IFNAME: eth0}`: those of this process do not reach other
    machines."""
    working_dir: Annotated[str | None, PathSetting(reads=True)] = None
    """A folder that Ray copies to every machine and makes their working directory, or the URI of one: for files that
    `env_vars` name, and modules that an installed plugin imports. It installs nothing, and so brings no plugin."""


class FsdpBackendConfig(BackendConfig):
    """FSDP2: every rank holds a part of the weights, gradients and optimizer, and trains on a part of the batch."""

    generates: ClassVar[bool] = True
    checkpoint_reader: ClassVar[str | None] = "spurline_fsdp_backend.checkpoint_reader:read_weights"
    beyond: ClassVar[str] = "Train adapters (backend.lora), a smaller model, or on more machines."
    update_parts: ClassVar[frozenset[str]] = frozenset(
        {"gradients", "activations", "logits", "gathered weights", "gradients on their way"}
    )

    name: str = "fsdp"
    ranks: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Processes, each with one GPU; null takes all GPUs of the machine, and 2 processes on CPU. With `launch: ray` it
    has to be said."""
    launch: Annotated[Launch, OnResume.FREE] = "local"
    """`local` starts the ranks on this machine; `ray` as actors of a Ray cluster."""
    device: Annotated[Literal["auto", "cpu", "cuda"], OnResume.TO_ROUNDING] = "auto"
    """`auto` takes GPUs when there are some."""
    precision: Annotated[Literal["auto", "fp32", "bf16"], OnResume.BY_NAME] = "auto"
    """`bf16` keeps fp32 weights, computes in bf16 and sums gradients in fp32; `auto` is bf16 on GPUs, fp32 on CPU."""
    ranks_per_node: Annotated[int | None, OnResume.FREE] = Field(default=None, gt=0)
    """Ranks of one machine of a cluster; null takes all GPUs of each, of one machine where that is enough."""
    runtime_env: Annotated[RuntimeEnvConfig, OnResume.FREE] = RuntimeEnvConfig()
    """With `launch: ray`: what the machines of the cluster get from this one. Engines on the cluster get it too."""
    gpus: Annotated[tuple[int, ...] | None, OnResume.FREE] = None
    """GPUs of this machine that the ranks may have, where rollout engines need the others; null for all."""
    replicas: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Copies of the sharded model, usually as many as there are nodes: less traffic between them, more memory."""
    context: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Ranks that share each sequence, for sequences too long for one."""
    expert: Annotated[int, OnResume.TO_ROUNDING] = Field(default=1, gt=0)
    """Ranks that divide the experts of a mixture-of-experts model."""
    max_tokens_per_microbatch: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """Fill each micro-batch of a rank, or of the ranks that share sequences, with whole rows up to this many tokens,
    padding not counted; null takes all rows."""
    activation_checkpointing: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    compile: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Run each decoder layer through torch.compile."""
    cpu_offload: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Keep weights, gradients and optimizer in the memory of the host: slower, for models that do not fit."""
    reshard_after_forward: Annotated[bool, OnResume.TO_ROUNDING] = True
    """Give gathered weights of a layer back after its forward pass; false keeps them for its backward pass:
    more memory, less to send."""
    logits_chunk_tokens: Annotated[int, OnResume.TO_ROUNDING] = Field(default=4096, gt=0)
    """Positions of one rank whose logits exist at the same time."""
    lora: LoraConfig | None = None
    """Train adapters instead of all weights."""
    num_threads: Annotated[int | None, OnResume.TO_ROUNDING] = Field(default=None, gt=0)
    """CPU threads of each rank; null divides the cores of a machine among its ranks."""
    deterministic: Annotated[bool, OnResume.TO_ROUNDING] = False
    """Use deterministic kernels, so that two runs on GPUs are equal bit for bit; slower."""
    probe: Annotated[bool, OnResume.FREE] = True
    """Check at start-up that packed rows and chunked logits are exact for this model."""
    start_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds that the ranks may take to start and find each other, before any weight is loaded."""
    call_timeout_s: Annotated[float, OnResume.FREE] = Field(default=3600.0, gt=0)
    """Seconds that one update, evaluation or checkpoint may take, loading the model, or its download to machines of a
    cluster."""
    collective_timeout_s: Annotated[float, OnResume.FREE] = Field(default=600.0, gt=0)
    """Seconds that one exchange between ranks may take."""

    def problems(self, run: RunConfig) -> Iterable[Problem]:
        yield from self._launch_problems()
        ranks = self.num_ranks
        if not ranks:
            yield Problem(
                "ranks",
                "takes all GPUs of this machine, and there are none. Set device: cpu to try it out, or say how many "
                "there are where it trains, such as ranks: 8.",
            )
            return
        for key in ("replicas", "context", "expert"):
            if ranks % getattr(self, key):
                fitting = ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)
                yield Problem(
                    key,
                    f"is {getattr(self, key)}, which does not divide the {ranks} ranks. Choose one of "
                    f"{fitting}, or change backend.ranks.",
                )
        if self.replicas > 1 and self.expert > 1:
            yield Problem("expert", "together with replicas is not supported. Set one of them to 1.")
        if self.lora is not None and self.expert > 1:
            yield Problem("lora", "together with expert is not supported: adapters of experts would not be divided.")
        if self.compile and self.expert > 1:
            yield Problem(
                "compile", "together with expert is not supported: tokens travel within a layer. Turn one off."
            )
        if self.gpus is not None:
            yield from self._gpu_problems(self.gpus)
        if self.ranks_per_node is not None and ranks > self.ranks_per_node and ranks % self.ranks_per_node:
            yield Problem(
                "ranks_per_node",
                f"is {self.ranks_per_node}, which does not divide the {ranks} ranks. All machines have equally many.",
            )
        optimizers = [("optimizer", run.optimizer)]
        if run.critic is not None:
            optimizers.append(("critic.optimizer", run.critic.optimizer))
        for key, optimizer in optimizers:
            if optimizer.needs_whole_parameters is not None:
                yield Problem(
                    "name",
                    f"is {self.name}, which gives each rank a part of every parameter, and {key} '{optimizer.name}' "
                    f"needs whole ones: {optimizer.needs_whole_parameters}. Use adamw.",
                )

    def _launch_problems(self) -> Iterable[Problem]:
        if self.launch != "ray":
            if self.runtime_env != RuntimeEnvConfig():
                yield Problem("runtime_env", "is for the machines of a cluster. Set launch: ray, or remove it.")
            if self.ranks_per_node is not None:
                yield Problem("ranks_per_node", "is for the machines of a cluster. Set launch: ray, or remove it.")
            return
        # A config is read before any cluster is asked, and by commands that never ask one.
        if self.ranks is None:
            yield Problem("ranks", "has to be said with launch: ray: machines of the cluster times GPUs of each.")
        if self.device == "auto" and not num_gpus():
            yield Problem(
                "device",
                "is auto, which looks at this machine, and it has no GPU; those of the cluster may have some. Set "
                "device: cuda, or device: cpu.",
            )

    def _gpu_problems(self, gpus: tuple[int, ...]) -> Iterable[Problem]:
        if self.on == "cpu":
            yield Problem("gpus", "names GPUs, and the ranks are on CPU. Remove it, or set device: cuda.")
        if self.launch == "ray":
            yield Problem("gpus", "names GPUs of this machine, and launch: ray lets the cluster choose. Remove one.")
        if len(gpus) != len(set(gpus)):
            yield Problem("gpus", f"names a GPU twice: {list(gpus)}. Each rank has one of its own.")
        elif self.ranks is not None and self.ranks > len(gpus):
            yield Problem(
                "gpus",
                f"names {len(gpus)} GPUs, and there are {self.ranks} ranks, each with one of its own. Name "
                f"{self.ranks - len(gpus)} more, or set ranks: {len(gpus)}.",
            )

    @property
    def on(self) -> Literal["cpu", "cuda"]:
        """The device that `auto` stands for here."""
        if self.device == "auto":
            return "cuda" if num_gpus() else "cpu"
        return self.device

    @property
    def computes_in(self) -> Literal["fp32", "bf16", "fp64"]:
        if self.precision == "auto":
            return "bf16" if self.on == "cuda" else "fp32"
        return self.precision

    @property
    def num_ranks(self) -> int:
        """As many as the machine has GPUs, where none are asked for."""
        if self.ranks is not None:
            return self.ranks
        if self.on == "cpu":
            return RANKS_ON_CPU
        return len(self.gpus) if self.gpus is not None else num_gpus()

    def rank_request(self) -> RankRequest:
        environment = RuntimeEnv(self.runtime_env.env_vars, self.runtime_env.working_dir)
        return RankRequest(
            self.num_ranks, self.on, self.launch, self.ranks_per_node, self.gpus, self.num_threads, environment
        )

    @property
    def limits(self) -> TimeLimits:
        return TimeLimits(self.start_timeout_s, self.call_timeout_s, self.collective_timeout_s)

    def layout(self) -> ParallelLayout:
        # Alignment for context parallelism is made in the rank's own stream, where padding is dropped anyway.
        return ParallelLayout(data=self.num_ranks // self.context)

    def describe_device(self) -> str:
        return f" on {self.num_ranks} ranks, {self.on}, {self.computes_in}"

    @property
    def trains_adapters(self) -> bool:
        return self.lora is not None

    @property
    def dropout_rates(self) -> Mapping[str, float]:
        return {} if self.lora is None else {"lora.dropout": self.lora.dropout}

    @property
    def microbatch_bound(self) -> int | None:
        return self.max_tokens_per_microbatch

    def missing_here(self) -> str | None:
        if self.launch == "ray" or self.on == "cpu" or self.num_ranks <= num_gpus():
            return None
        return (
            f"backend.ranks is {self.num_ranks}, each with a GPU, and this machine has {num_gpus()}: this config "
            "trains elsewhere only"
        )

    # What looks at the model's architecture is found by name, as factories are: it needs torch, and a config must not.

    def check_model(self, run: RunConfig) -> None:
        if self.lora is not None:
            check_peft()
        if self.launch == "ray":
            check_ray()
        self._part("layout:check_model")(self, run)

    def describe_layout(self, run: RunConfig) -> Sequence[str]:
        return list(self._part("layout:describe_layout")(self))

    def savings(self, run: RunConfig, row_length: int, tokens: int) -> Iterable[Mapping[str, Any]]:
        return self._part("layout:savings")(self, run, row_length, tokens)

    def device_bytes(self) -> int | None:
        return self._part("memory:device_bytes")(self)

    def estimate_memory(self, run: RunConfig, row_length: int, tokens: int) -> dict[str, int]:
        return self._part("memory:estimate_memory")(self, run, row_length, tokens)

    def estimate_generation(self, run: RunConfig) -> dict[str, int]:
        return self._part("memory:estimate_generation")(self, run)

    def estimate_host_memory(self, run: RunConfig) -> int:
        return self._part("memory:estimate_host_memory")(self, run)

    def doctor(self, run: RunConfig) -> Iterator[Finding]:
        return self._part("doctor:doctor")(self, run)

    @staticmethod
    def _part(name: str) -> Callable[..., Any]:
        return resolve(f"spurline_fsdp_backend.{name}", "backend 'fsdp'")
