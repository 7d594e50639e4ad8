"""Estimate how long a step takes, to rank layouts of one model on the same devices.

A sum of what each part needs by itself at the speeds of a data sheet: a matrix multiplication takes its operations or
its bytes, whichever is longer; exchanges between ranks are not hidden behind computation, but those that Megatron-core
hides. Layouts are to come out in the right order; the seconds are a rough guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from spurline_megatron_backend.architecture import Architecture
from spurline_megatron_backend.grid import Grid
from spurline_megatron_backend.memory import kept_values
from spurline_megatron_backend.workload import Layout, Recompute, Stages, Step

GIB = 2**30

RANKS_OF_MACHINE = 8
"""Devices of one machine where nothing tells: of a DGX or HGX."""


@dataclass(frozen=True)
class Device:
    """Speeds of a GPU, as its data sheet gives them.

    gib: up to this much memory, a device is taken for this kind. bf16_flops, fp32_flops: operations per second, dense.
    memory, link, network: bytes per second: of its memory, to devices of its machine in one direction, and to other
    machines, with one network card for each device.
    """

    name: str
    gib: int
    bf16_flops: float
    fp32_flops: float
    memory: float
    link: float
    network: float


DEVICES = (
    # NVIDIA A100 data sheet (SXM); DGX A100: eight 200 Gb/s cards.
    Device("A100 40 GB", 48, 312e12, 19.5e12, 1.555e12, 300e9, 25e9),
    # NVIDIA H100 data sheet (SXM); DGX H100: eight 400 Gb/s cards.
    Device("H100", 96, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    # NVIDIA H200 data sheet (SXM): an H100 with more memory.
    Device("H200", 160, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    # DGX B200 data sheet, by eight.
    Device("B200", 1024, 2250e12, 75e12, 8e12, 900e9, 50e9),
)

# Shares of those speeds that kernels and exchanges reach; assumptions near what Megatron-core's own tables of
# throughput come to: Llama 3 at 40 to 50 % of an H100's operations with everything counted.
MATMUL_SHARE = 0.7
ATTENTION_SHARE = 0.4
MEMORY_SHARE = 0.8
LINK_SHARE = 0.7
NETWORK_SHARE = 0.7

LAUNCH_S = 20e-6
"""A matrix multiplication takes at least this long: Python launches it and what follows it."""

EXCHANGE_S = 30e-6
"""An exchange between ranks takes at least this long."""


def device_of(device_bytes: int) -> Device:
    """The kind of device that has so much memory: 80 GB are taken for an H100."""
    return next(device for device in DEVICES if device_bytes <= device.gib * GIB or device is DEVICES[-1])


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part, each on the busiest rank.

    bubble: waiting of a pipeline that fills and empties.
    """

    compute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    bubble: float
    data: float
    optimizer: float

    @property
    def total(self) -> float:
        return (
            self.compute
            + self.tensor
            + self.context
            + self.expert
            + self.pipeline
            + self.bubble
            + self.data
            + self.optimizer
        )


@dataclass(frozen=True)
class _LayerTime:
    """Seconds of a layer for one micro-batch, forward and backward."""

    compute: float
    tensor: float
    context: float
    expert: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.context + self.expert


@dataclass(frozen=True)
class Speeds:
    """A device and its neighbours.

    ranks_of_machine: how many have neighbours without a network. computed_bytes: 2 for bf16, 4 for fp32.
    """

    device: Device
    ranks_of_machine: int = RANKS_OF_MACHINE
    computed_bytes: int = 2

    @property
    def flops(self) -> float:
        return self.device.bf16_flops if self.computed_bytes == 2 else self.device.fp32_flops

    def matmul(self, rows: float, inner: float, columns: float, *, backward: bool = False) -> float:
        """Seconds of [rows, inner] x [inner, columns], or of both multiplications of its backward pass."""
        operations = 2 * rows * inner * columns / (self.flops * MATMUL_SHARE)
        moved = self.computed_bytes * (rows * inner + inner * columns + rows * columns)
        once = max(operations, self._moving(moved), LAUNCH_S)
        if not backward:
            return once
        # The gradient of the weight is added to a sum in fp32.
        return once + max(operations, self._moving(moved + 8 * inner * columns), LAUNCH_S)

    def _moving(self, moved: float) -> float:
        return moved / (self.device.memory * MEMORY_SHARE)

    def elementwise(self, values: float) -> float:
        """Seconds in which values are written or read."""
        return self._moving(values * self.computed_bytes)

    def exchange(self, moved: float, *, ranks: int, stride: int) -> float:
        """Seconds in which each rank sends so many bytes to others of its group.

        Every stride-th rank belongs to the group, which has so many. What stays in the machine travels meanwhile.
        """
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, self.ranks_of_machine // stride))
        outside = moved * (ranks - inside) / max(1, ranks - 1)
        within = (moved - outside) / (self.device.link * LINK_SHARE)
        return EXCHANGE_S + max(within, outside / (self.device.network * NETWORK_SHARE))

    def reduce(self, moved: float, *, ranks: int, stride: int) -> float:
        """Seconds of a gather or a sum in a ring through the group, in which each rank sends so many bytes.

        A machine's ranks share its network cards: each sends a part of what leaves the machine.
        """
        if ranks == 1:
            return 0.0
        inside = max(1, min(ranks, self.ranks_of_machine // stride))
        within = moved / (self.device.link * LINK_SHARE) if inside > 1 else 0.0
        # As many rings as there are ranks of the group in a machine, each over a card of its own.
        outside = moved / inside / (self.device.network * NETWORK_SHARE) if ranks > inside else 0.0
        return EXCHANGE_S + max(within, outside)


def least_time(architecture: Architecture, layout: Layout, step: Step, speeds: Speeds) -> float:
    """Seconds below which no estimate of a step comes, whatever the stages: of the layers alone, found at once."""
    tokens = math.ceil(step.tokens_of_microbatch(layout) / layout.grid.context)
    layer = _layer_of(architecture, layout, step, tokens, speeds)
    return step.num_microbatches(layout) * architecture.num_layers / layout.grid.pipeline * layer.total


def _layer_of(architecture: Architecture, layout: Layout, step: Step, tokens: int, speeds: Speeds) -> _LayerTime:
    row_length = min(step.row_length, step.tokens)
    alone = _one_stage(layout)
    return _layer(architecture, alone, layout.recompute, layout.sequence_parallel, tokens, row_length, speeds)


def estimate_step(architecture: Architecture, layout: Layout, step: Step, speeds: Speeds) -> StepTime:
    """Seconds of one optimizer step."""
    grid = layout.grid
    number = step.num_microbatches(layout)
    tokens = math.ceil(step.tokens_of_microbatch(layout) / grid.context)
    layer = _layer_of(architecture, layout, step, tokens, speeds)
    head = _head(architecture, grid.tensor, tokens, speeds)
    stages = Stages(architecture, grid)
    # Parts of a stage take turns: all wait for the largest.
    turns = [grid.virtual_stages * max(parts) for parts in stages.layers]
    seconds = [turn * layer.total for turn in turns]
    seconds[-1] += head
    slowest = max(range(grid.pipeline), key=seconds.__getitem__)
    # Filling and emptying: Narayanan et al. 2021, (p - 1) / (v m) of the time of all micro-batches.
    bubble = (grid.pipeline - 1) / grid.virtual_stages * sum(seconds) / grid.pipeline
    sent = tokens * architecture.hidden * speeds.computed_bytes / layout.sequence_share
    one_hop = speeds.exchange(sent, ranks=2 if grid.pipeline > 1 else 1, stride=grid.ranks_of_stage)
    data, optimizer = _after_gradients(architecture, replace(grid, virtual_stages=1), speeds)
    times = number * turns[slowest]
    return StepTime(
        compute=times * layer.compute + (number * head if stages.is_last(slowest) else 0.0),
        tensor=times * layer.tensor,
        context=times * layer.context,
        expert=times * layer.expert,
        pipeline=2 * number * grid.virtual_stages * one_hop,
        bubble=bubble,
        data=data,
        optimizer=optimizer,
    )


@lru_cache(maxsize=8192)
def _after_gradients(architecture: Architecture, grid: Grid, speeds: Speeds) -> tuple[float, float]:
    """Seconds in which gradients are summed and weights gathered, and of the optimizer's own step."""
    stages = Stages(architecture, grid)
    values = max(map(stages.values, stages.unlike), key=lambda values: values.all)
    # Gradients are summed in fp32, and weights gathered as they are computed with.
    of_value = 4 + speeds.computed_bytes
    dense, experts = grid.data * grid.context, grid.expert_data
    data = speeds.reduce(of_value * values.dense * (dense - 1) / dense, ranks=dense, stride=grid.tensor)
    if values.expert:
        moved = of_value * values.expert * (experts - 1) / experts
        data += speeds.reduce(moved, ranks=experts, stride=grid.expert * grid.expert_tensor)
    # Weight, its copy, gradient and two moments are read, and all but the gradient written.
    owned = values.dense / dense + values.expert / experts
    optimizer = owned * (2 * 12 + 4 + speeds.computed_bytes) / (speeds.device.memory * MEMORY_SHARE)
    return data, optimizer


def _one_stage(layout: Layout) -> Grid:
    """What the time of a layer depends on."""
    grid = layout.grid
    return Grid(0, grid.tensor, 1, 1, grid.context, grid.expert, grid.expert_tensor)


@lru_cache(maxsize=1024)
def _head(architecture: Architecture, tensor: int, tokens: int, speeds: Speeds) -> float:
    """Seconds of the output layer: positions are computed in chunks, each again in the backward pass."""
    columns = math.ceil(architecture.vocabulary / tensor)
    forward = speeds.matmul(tokens, architecture.hidden, columns)
    # Softmax reads and writes logits in fp32 a few times.
    softmax = 6 * speeds.elementwise(tokens * columns * 4 / speeds.computed_bytes)
    return 2 * forward + speeds.matmul(tokens, architecture.hidden, columns, backward=True) + softmax


@lru_cache(maxsize=8192)
def _layer(
    a: Architecture,
    grid: Grid,
    recompute: Recompute,
    sequence_parallel: bool,
    tokens: int,
    row_length: int,
    speeds: Speeds,
) -> _LayerTime:
    layout = Layout(grid, recompute=recompute, sequence_parallel=sequence_parallel)
    computed = speeds.computed_bytes
    queries, keys = a.heads // grid.tensor * a.head_dim, a.key_value_heads // grid.tensor * a.head_dim
    matmuls = [(float(tokens), a.hidden, queries + 2 * keys, 1), (float(tokens), queries, a.hidden, 1)]
    # Causal attention within rows: half of all pairs, for scores and for results.
    attention = 2 * tokens * queries * row_length / (speeds.flops * ATTENTION_SHARE)
    gathers = 1
    copies = 0.0
    if a.num_experts:
        matmuls.append((tokens / layout.sequence_share, a.hidden, a.num_experts, 1))
        local = a.num_experts // grid.expert
        copies = layout.expert_load * tokens / layout.sequence_share * a.experts_per_token
        of_expert, width = copies * grid.expert_tensor / local, a.expert_ffn // grid.expert_tensor
        matmuls += [(of_expert, a.hidden, 2 * width, local), (of_expert, width, a.hidden, local)]
    else:
        gathers = 2
        width = a.ffn // grid.tensor
        matmuls += [(float(tokens), a.hidden, 2 * width, 1), (float(tokens), width, a.hidden, 1)]
    kept = speeds.elementwise(tokens * kept_values(a, layout, layout.expert_load))
    forward = sum(times * speeds.matmul(*shape) for *shape, times in matmuls)
    backward = sum(times * speeds.matmul(*shape, backward=True) for *shape, times in matmuls)
    again = {"none": 0.0, "selective": attention, "full": forward + attention + kept}[recompute]
    # The backward pass of attention computes its scores again. What is kept is written, read, and read again.
    compute = forward + backward + attention * (1 + 2.5) + again + 3 * kept

    # A gather before and a sum after each half of a layer; in the backward pass two more gathers, of which Megatron
    # hides those that a multiplication does not wait for.
    times = gathers * (2 + 2 + (2 if recompute == "full" else 0))
    moved = tokens * a.hidden * computed * (grid.tensor - 1) / grid.tensor
    tensor = times * speeds.reduce(moved, ranks=grid.tensor, stride=1)

    passes = 3 if recompute == "full" else 2
    context = 0.0
    if grid.context > 1:
        shared = math.lcm(a.key_value_heads // grid.tensor, grid.context) * a.head_dim
        moved = tokens * (2 * queries + 2 * shared) * computed * (grid.context - 1) / grid.context
        context = passes * speeds.exchange(moved, ranks=grid.context, stride=grid.tensor)
    expert = 0.0
    if a.num_experts:
        moved = copies * a.hidden * computed * (grid.expert - 1) / grid.expert
        # Tokens go to their experts and come back.
        expert = 2 * passes * speeds.exchange(moved, ranks=grid.expert, stride=grid.expert_tensor)
        moved = copies * a.hidden * computed * (grid.expert_tensor - 1)
        expert += 2 * passes * speeds.reduce(moved, ranks=grid.expert_tensor, stride=1)
    return _LayerTime(compute, tensor, context, expert)
