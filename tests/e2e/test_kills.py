"""kill -9 at random instants, of one process or of ranks; the same command goes on with the uninterrupted metrics.

The state of a plugin, the average of the example plugin, goes on bit for bit too.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import psutil
import pytest
import torch
from async_runs import ranks_of
from every_run import IN_LONG_RUNS, SOAK
from fake_plugins import install_plugin
from run_helpers import (
    Config,
    KillableProcess,
    assert_metrics_close,
    assert_same_run,
    config_to_kill,
    on_ranks,
    train,
    wait_for,
)
from safetensors.torch import load_file

from spurline.run.checkpoints.checkpoint import CheckpointStore

EXAMPLES = Path(__file__).parents[2] / "examples"

Victim = Literal["controller", "rank", "all"]
Kill = Callable[..., KillableProcess]

MANY: tuple[Victim, ...] = ("rank", "controller", "all") * 10
LISTENS = "0A"
"""The state of a listening socket in the tables of the kernel."""

LAYOUTS: tuple[dict[str, int], ...] = (
    {"ranks": 2, "pipeline": 2},
    {"ranks": 2, "tensor": 2},
    {"ranks": 2},
    {"ranks": 2, "context": 2},
    {"ranks": 1},
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("beside", [False, True])
def test_a_killed_run_of_one_process_ends_with_the_metrics_and_states_of_the_uninterrupted_one(
    base_config: Config,
    spurline_chat_file: Path,
    killable_process: Kill,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    beside: bool,
) -> None:
    """beside: a checkpoint is written after each step while training goes on, so that most kills interrupt a write."""
    kills = (20 if beside else 100) if SOAK else 2 if beside else 4
    install_plugin(tmp_path / "site", monkeypatch, "ema", "spurline_plugin_ema.plugin", EXAMPLES / "plugin_ema" / "src")
    ema = {"plugins": ["ema"], "ema": {"decay": 0.9, "export": False}}
    config = config_to_kill(base_config | ema, spurline_chat_file, 12 * kills)
    if beside:
        config["checkpoint"] = {"every_steps": 1, "async": True}
    whole = train(config, name="whole")
    instants = random.Random(7)
    for kill in range(kills):
        # Every fourth somewhere in the start: reading, restoring, cutting the metrics back.
        steps = instants.randint(1, 6) if kill % 4 != 3 else None
        process = killable_process(config)
        process.wait_for_steps(steps, instants.uniform(0, 0.4 if steps is None else 0.03))
        process.kill()
        if (Path(config["run_dir"]) / "checkpoints").exists():
            CheckpointStore(Path(config["run_dir"]) / "checkpoints").latest()
    run = train(config)
    assert_same_run(run, whole)
    one, other = (
        load_file(kept.run_dir / f"checkpoints/step-{kept.step:08d}/hooks/ema/weights.safetensors")
        for kept in (run, whole)
    )
    assert one.keys() == other.keys()
    assert all(name.startswith("weights/") for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert [line["step"] for line in run.lines if "ema/loss" in line][:2] == [10, 20]


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(("rank",), marks=pytest.mark.processes, id="once"),
        pytest.param(MANY, marks=[pytest.mark.timeout(3600), *IN_LONG_RUNS], id="often"),
    ],
)
@pytest.mark.parametrize("case", ["fsdp", "fsdp, other ranks", "megatron, other layouts"])
def test_killed_ranks_go_on_with_the_metrics_of_the_uninterrupted_run(
    base_config: Config, spurline_chat_file: Path, killable_process: Kill, case: str, victims: Sequence[Victim]
) -> None:
    """They are equal bit for bit on the same ranks, with dropout too, and to rounding on others."""
    config = whole = config_to_kill(base_config, spurline_chat_file, 6 + 6 * len(victims))
    if case != "fsdp":
        # Dropout is drawn by rank, and Megatron models have none.
        del config["model"]["config_overrides"]
    if case == "fsdp":
        layouts, last, whole = [on_ranks(config)] * len(victims), on_ranks(config), on_ranks(config)
    elif case == "fsdp, other ranks":
        victims = ["controller" if victims == ("rank",) else victim for victim in victims]
        layouts = [on_ranks(config, 1 + number % 3) for number in range(len(victims))]
        last, whole = on_ranks(config, 3), on_ranks(config, 2)
    else:
        sizes = [LAYOUTS[number % len(LAYOUTS)] for number in range(len(victims))]
        layouts = [on_ranks(config, backend="megatron", **size) for size in sizes]
        last = on_ranks(config, backend="megatron", tensor=2)
    instants = random.Random(7)
    for number, (layout, victim) in enumerate(zip(layouts, victims, strict=True)):
        # Every fourth somewhere in the start: ranks come up, load the model, restore.
        steps = instants.randint(1, 5) if number % 4 != 3 else None
        process = killable_process(layout, warm_children=not SOAK)
        process.wait_for_steps(steps, instants.uniform(0, 4.0 if steps is None else 0.05))
        _kill(process, victim, instants)
    killed, expected = train(last).without_times, train(whole, name="whole").without_times
    if case == "fsdp":
        assert killed == expected
    else:
        assert_metrics_close(killed, expected, 1e-5, ("loss", "grad_norm", "lr", "eval/loss"))


def _kill(process: KillableProcess, victim: Victim, instants: random.Random) -> None:
    """Kill some processes of the run, and wait until all have ended and no socket listens."""
    controller = psutil.Process(process.pid)
    # The ranks, if they have been started by now.
    ranks = ranks_of(process.pid)
    sockets = set[str]().union(*map(_sockets_of, (controller, *ranks)))
    listening = sockets & _listening_sockets()
    if victim == "rank" and ranks:
        instants.choice(ranks).kill()
    else:
        for each in (controller, *ranks) if victim == "all" else (controller,):
            each.kill()
    # Taking down an interpreter with torch in it takes two seconds of its own.
    code = process.wait(180)
    assert code == (1 if victim == "rank" and ranks else -signal.SIGKILL)
    wait_for(lambda: not any(each.is_running() for each in ranks), "the end of all processes", 25)
    # Not the ports: another program of this machine may have been given one of them by now.
    assert not listening & _listening_sockets()


def _sockets_of(process: psutil.Process) -> set[str]:
    """Return the numbers of the sockets of a process, none if it has ended."""
    found: set[str] = set()
    with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
            # A descriptor may be closed while this looks at it.
            with suppress(FileNotFoundError):
                kind, _, number = descriptor.readlink().name.partition(":")
                if kind == "socket":
                    found.add(number.strip("[]"))
    return found


def _listening_sockets() -> set[str]:
    """Return the numbers of the TCP sockets on this machine that listen."""
    lines = [line.split() for table in ("tcp", "tcp6") for line in Path("/proc/net", table).read_text().splitlines()]
    return {fields[9] for fields in lines if fields[3] == LISTENS}
