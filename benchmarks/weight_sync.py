"""Measure the cost of publishing weights with each transport: seconds per GiB, and memory of sender and receiver.

    python benchmarks/weight_sync.py [--json] [--gib 1.0] [--bucket-mb 64] [--repeats 3] [--ranks 0] [--only NAME ...]

The trainer has random fp32 weights in this process, or in `--ranks` ranks of FSDP. The engine is `child_process`, which
writes the weights into a model of the same size. The seconds are from the first bucket until the engine has taken over
the last bucket. The benchmark compares them with a plain copy of the same bytes in this process. Transports and copy
take turns, and figures are medians.

Memory is RssAnon and RssShmem of each process, read every few milliseconds during the first publish of a transport,
minus its value just before. It includes libraries that the transport loads, and its unit is the size of a bucket. If
weights come from ranks, `sender` is the rank that needs most.

Gate: with `collective`, each side needs at most two buckets, and an eighth of a bucket for threads and libraries. The
benchmark needs free memory for three models, and space for one model in the folder for temporary files (TMPDIR).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from timing import Gate, gates_as_json, print_gates

from spurline.config.run_config import RunConfig
from spurline.plugins.host import PluginHost
from spurline_async_rl.engines.child_process import ChildProcessEngine
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_models.testing import write_tiny_model
from spurline_rl.protocols.rollout_engine import TakesWeights
from spurline_rl.protocols.weight_sync import WeightSync
from spurline_rl.testing.backend_runs import backend_run, opened
from spurline_text.tokenizer import load_tokenizer

TRANSPORTS = ("shared_memory", "collective", "disk")
SAMPLE_EVERY_S = 0.003
SETTLE_S = 0.3
"""Seconds for which memory is read before a publish and after it."""
LIMIT_BUCKETS = 2.125
ENGINE = "spurline_async_rl.engines.child_process"


@dataclass(frozen=True)
class Cost:
    """The cost of one transport.

    Attributes:
        seconds_per_gib: The median seconds for a GiB.
        times_copy: The median ratio of its seconds to the copy's seconds in the same turn.
        sender_buckets: The largest additional memory of the sender, in buckets.
        receiver_buckets: The largest additional memory of the receiver, in buckets.
        bytes_sent: The bytes of a publish.
    """

    seconds_per_gib: float
    times_copy: float
    sender_buckets: float
    receiver_buckets: float
    bytes_sent: int


def write_large_model(folder: Path, gib: float) -> Path:
    """Write a model of about this size in fp32. The largest tensor has 12 MiB, or 3 MiB below 0.5 GiB."""
    hidden = 1024 if gib >= 0.5 else 512
    layer = (3 * hidden * 3 * hidden + 3 * hidden * hidden) * 4
    return write_tiny_model(
        folder,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=max(1, round(gib * 2**30 / layer)),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        tie_word_embeddings=True,
    )


class Held:
    """The part of a backend that a publish needs, with weights in the memory of this process."""

    def __init__(self, model: Path, device: str) -> None:
        from safetensors.torch import load_file

        # Adding a number copies the weights. Pages of the mapped file would be read from disk while the clock runs.
        loaded = load_file(model / "model.safetensors", device=device)
        self.weights = {name: tensor + 1e-3 for name, tensor in loaded.items()}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()


class Memory:
    """Reads RssAnon and RssShmem of some processes on a thread while the context is open."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._first = {pid: own_bytes(pid) for pid in pids}
        self._peaks = dict(self._first)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def growth(self, pids: Sequence[int]) -> int:
        """Return the largest growth of any of these processes, in bytes."""
        return max(self._peaks[pid] - self._first[pid] for pid in pids)

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_EVERY_S):
            for pid in self._pids:
                self._peaks[pid] = max(self._peaks[pid], own_bytes(pid))


def own_bytes(pid: int) -> int:
    """Return the memory of a process without mapped files, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    lines = (line.split() for line in status.splitlines() if line.startswith(("RssAnon", "RssShmem")))
    return sum(int(line[1]) * 1024 for line in lines)


@contextmanager
def trainer(model: Path, ranks: int, device: str) -> Iterator[tuple[Any, list[int], RunConfig]]:
    """Yield the backend, the ids of the sending processes, and the config of the run."""
    plugins = ("async_rl", "fsdp_backend") if ranks else ("async_rl",)
    section = {"name": "fsdp", "ranks": ranks} if ranks else {"name": "local"}
    loaded = backend_run(model, section | {"device": "cpu", "num_threads": 1, "probe": False}, plugins)
    if not ranks:
        yield Held(model, device), [psutil.Process().pid], loaded.config
        return
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with opened(loaded) as (backend, _):
        after = {child.pid for child in psutil.Process().children(recursive=True)}
        yield backend, sorted(after - before)[-ranks:], loaded.config


def engine_pid() -> int:
    """Return the process id of the only engine."""
    (engine,) = (child.pid for child in psutil.Process().children(recursive=True) if ENGINE in child.cmdline())
    return engine


def sync_by(name: str, run: RunConfig, bucket_mb: int) -> WeightSync:
    registry = PluginHost.load(["async_rl"]).registry
    config: Any = registry.get("weight_sync", name).config
    return registry.create("weight_sync", config(name=name, bucket_mb=bucket_mb), run=run)


async def measure(
    model: Path, ranks: int, names: Sequence[str], bucket_mb: int, repeats: int, device: Literal["cpu", "cuda"] = "cpu"
) -> dict[str, Any]:
    """Return the figures of each transport and of the plain copy. `device` is that of the engine and of `Held`."""
    with ExitStack() as stack:
        backend, senders, run = stack.enter_context(trainer(model, ranks, device))
        run = run.model_copy(update={"run_dir": model.parent / "run"})
        engine = ChildProcessEngine(ChildProcessEngineConfig(device=device), run, load_tokenizer(run.model))
        try:
            await engine.start()
            # The engine's model may be a mapped file, whose pages become the process's own when they are written.
            await publish_once(engine, backend, "disk", run, bucket_mb)
            memory = {name: await measure_memory(engine, backend, senders, name, run, bucket_mb) for name in names}
            seconds, sent = await measure_seconds(
                engine, backend, names, run, bucket_mb, copier(model, device), repeats
            )
        finally:
            await engine.close()
    gib = next(iter(sent.values())) / 2**30
    copies = seconds.pop("copy")
    return {
        "gib": gib,
        "copy_seconds_per_gib": statistics.median(copies) / gib,
        "transports": {
            name: Cost(
                seconds_per_gib=statistics.median(taken) / gib,
                times_copy=statistics.median(one / other for one, other in zip(taken, copies, strict=True)),
                sender_buckets=memory[name][0] / (bucket_mb << 20),
                receiver_buckets=memory[name][1] / (bucket_mb << 20),
                bytes_sent=sent[name],
            )
            for name, taken in seconds.items()
        },
    }


async def publish_once(engine: TakesWeights, backend: Any, name: str, run: RunConfig, bucket_mb: int) -> None:
    sync = sync_by(name, run, bucket_mb)
    try:
        await sync.publish(1, backend, [engine])
    finally:
        sync.close()


async def measure_memory(
    engine: TakesWeights, backend: Any, senders: Sequence[int], name: str, run: RunConfig, bucket_mb: int
) -> tuple[int, int]:
    """Return the additional bytes of sender and receiver in the first publish."""
    receiver = engine_pid()
    with Memory([*senders, receiver]) as memory:
        await asyncio.sleep(SETTLE_S)
        await publish_once(engine, backend, name, run, bucket_mb)
        await asyncio.sleep(SETTLE_S)
    return memory.growth(senders), memory.growth([receiver])


async def measure_seconds(
    engine: TakesWeights,
    backend: Any,
    names: Sequence[str],
    run: RunConfig,
    bucket_mb: int,
    copy: Callable[[], object],
    repeats: int,
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return the seconds of each turn, by transport and of the copy, and the bytes sent by each transport."""
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *names)}
    sent: dict[str, int] = {}
    syncs = {name: sync_by(name, run, bucket_mb) for name in names}
    try:
        for turn in range(1 + repeats):
            started = time.perf_counter()
            copy()
            taken = {"copy": time.perf_counter() - started}
            for name, sync in syncs.items():
                report = await sync.publish(turn + 2, backend, [engine])
                taken[name], sent[name] = report.transfer_s, report.bytes_sent
            # The first turn allocates memory and opens connections, so it does not count.
            if turn:
                for name, value in taken.items():
                    seconds[name].append(value)
    finally:
        for sync in syncs.values():
            sync.close()
    return seconds, sent


def copier(model: Path, device: str) -> Callable[[], object]:
    """Return a function that copies the model's weights from memory to memory."""
    source = Held(model, device).weights
    target = {name: torch.empty_like(tensor) for name, tensor in source.items()}

    def copy() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)
        if device == "cuda":
            torch.cuda.synchronize()

    return copy


def gates_of(transports: dict[str, Cost]) -> list[Gate]:
    cost = transports.get("collective")
    if cost is None:
        return []
    sides = {"sender": cost.sender_buckets, "receiver": cost.receiver_buckets}
    return [
        Gate(f"collective, memory of the {side}, buckets", value, LIMIT_BUCKETS, False) for side, value in sides.items()
    ]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--gib", type=float, default=1.0, help="size of the model in fp32")
    parser.add_argument("--bucket-mb", type=int, default=64, help="MiB of a bucket")
    parser.add_argument("--repeats", type=int, default=3, help="turns that are timed")
    parser.add_argument("--ranks", type=int, default=0, help="ranks of FSDP with the weights; 0 for this process")
    parser.add_argument("--only", nargs="+", default=TRANSPORTS, choices=TRANSPORTS, help="transports")
    arguments = parser.parse_args()
    # The engine also has one thread.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        model = write_large_model(Path(temporary) / "model", arguments.gib)
        figures = asyncio.run(measure(model, arguments.ranks, arguments.only, arguments.bucket_mb, arguments.repeats))
    gates = gates_of(figures["transports"])
    if arguments.json:
        figures["transports"] = {name: asdict(cost) for name, cost in figures["transports"].items()}
        asked = {"bucket_mb": arguments.bucket_mb, "ranks": arguments.ranks}
        print(json.dumps({**asked, **figures, "gates": gates_as_json(gates)}, indent=2))
        return
    print(f"{figures['gib']:.2f} GiB in buckets of {arguments.bucket_mb} MiB")
    print(f"a plain copy: {figures['copy_seconds_per_gib']:.2f} s/GiB")
    print(f"{'':<15} {'s/GiB':>6} {'x copy':>7} {'sender':>7} {'receiver':>9}  (buckets of memory)")
    for name, cost in figures["transports"].items():
        print(
            f"{name:<15} {cost.seconds_per_gib:6.2f} {cost.times_copy:7.1f} {cost.sender_buckets:7.2f} "
            f"{cost.receiver_buckets:9.2f}"
        )
    print_gates(gates)


if __name__ == "__main__":
    main()
