"""Full disks, folders that vanish, clocks that jump, few open files: a run says what stops it, and goes on later."""

from __future__ import annotations

import os
import pty
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from async_runs import asynchronous
from every_run import SOAK
from run_helpers import (
    Config,
    WriteConfig,
    assert_same_run,
    at,
    deterministic,
    num_lines,
    read_metrics,
    train,
    train_command,
    wait_for,
)
from warm_children import WarmRuns

from spurline.errors import RunDirectoryLostError, SpurlineError

DAY_S = 86400

Resize = Callable[[str], None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Resize]]:
    """A folder on a disk of its own, and what mounts it again with other options, such as another size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a disk takes the rights of root")

    def remount(options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)

    yield folder, remount
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def async_config(rl_config: Config) -> Config:
    """It has a timeline, recorded groups and a report, and equals the synchronous run."""
    return asynchronous(rl_config | {"steps": 4}, max_staleness=0)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["base_config", "async_config"])
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_space(
    kind: str, request: pytest.FixtureRequest, small_disk: tuple[Path, Resize]
) -> None:
    config: Config = request.getfixturevalue(kind)
    folder, remount = small_disk
    whole = train(config, name="whole")
    sizes_kib = (*range(4, 32, 4), *range(32, 1600, 24)) if SOAK else (8, 1200)
    for size_kib in sizes_kib:
        run_dir = folder / f"run-{size_kib}"
        config["run_dir"] = str(run_dir)
        remount(f"size={size_kib}k")
        with pytest.raises(SpurlineError, match=r"cannot be written.*No space.* Free some space") as raised:
            train(config)
        assert str(run_dir) in str(raised.value)
        print(size_kib, str(raised.value).replace(str(run_dir), ""))
        remount("size=64m")
        assert_same_run(train(config), whole)
        shutil.rmtree(run_dir)


@pytest.mark.processes
def test_a_disk_that_turns_read_only_is_named(small_disk: tuple[Path, Resize], base_config: Config) -> None:
    folder, remount = small_disk
    remount("ro")
    with pytest.raises(SpurlineError, match=rf"run_dir {folder}/run cannot be written: Read-only file system\. Choose"):
        train(base_config | {"run_dir": str(folder / "run")})


def replace(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()


@pytest.mark.parametrize("lose", [shutil.rmtree, replace])
def test_a_run_whose_directory_is_lost_ends_with_a_sentence_and_writes_nothing_in_its_place(
    base_config: Config, lose: Callable[[Path], object]
) -> None:
    run_dir = Path(base_config["run_dir"])
    with pytest.raises(RunDirectoryLostError, match=rf"run_dir {run_dir} was removed or moved") as raised:
        train(base_config, on_step_start=at(4, lose, run_dir))
    assert not hasattr(raised.value, "__notes__")
    assert not run_dir.exists() or not any(run_dir.iterdir())
    if lose is replace:
        run_dir.rmdir()
        run_dir.with_name("moved").rename(run_dir)
    assert train(base_config).step == 6


def test_a_clock_that_jumps_by_a_day_changes_nothing(async_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(async_config, name="whole")
    jumps, now, now_ns = random.Random(0), time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + jumps.randint(-1, 1) * DAY_S)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + jumps.randint(-1, 1) * DAY_S * 10**9)
    run = train(async_config)
    assert run.without_times == whole.without_times
    assert all(0 <= value < DAY_S / 2 for line in run.lines for name, value in line.items() if name.startswith("time/"))


@pytest.mark.processes
def test_few_open_files_and_no_home_are_enough(
    warm_runs: WarmRuns,
    async_config: Config,
    write_config: WriteConfig,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("HOME")
    run = warm_runs.start("train", write_config(async_config | {"steps": 2}), output=tmp_path / "log")
    resource.prlimit(run.pid, resource.RLIMIT_NOFILE, (64, 64))
    assert run.wait(60) == 0, (tmp_path / "log").read_text()


@pytest.mark.processes
def test_a_run_that_is_stopped_and_continued_is_the_same_run(
    warm_runs: WarmRuns, base_config: Config, write_config: WriteConfig
) -> None:
    whole = train(base_config, name="whole", steps=12)
    run = warm_runs.start("train", write_config(base_config | {"steps": 12}))
    metrics = Path(base_config["run_dir"]) / "metrics.jsonl"
    for steps in (1, 4, 8):
        wait_for(lambda steps=steps: num_lines(metrics) >= steps or run.poll() is not None, "another step")
        os.kill(run.pid, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(run.pid, signal.SIGCONT)
    assert run.wait(60) == 0
    assert deterministic(read_metrics(base_config["run_dir"])) == whole.without_times


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not SOAK, reason="a process with child engines of its own: in the soak")
def test_a_tiny_dev_shm_is_enough_for_engines_in_child_processes(
    async_config: Config, write_config: WriteConfig
) -> None:
    async_config["source"]["engine"] = {"name": "child_process", "deterministic": True}
    command = " ".join(train_command(write_config(async_config | {"steps": 2})))
    own = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size=64k tmpfs /dev/shm && exec {command}"]
    if subprocess.run([*own[:4], "mount -t tmpfs tmpfs /dev/shm"], check=False).returncode:
        pytest.skip("mounting a disk takes the rights of root")
    subprocess.run(own, check=True, timeout=120, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert [line["step"] for line in read_metrics(async_config["run_dir"])] == [1, 2]


@pytest.mark.processes
def test_a_run_whose_terminal_closes_finishes_and_saves_its_step(
    warm_runs: WarmRuns, base_config: Config, write_config: WriteConfig
) -> None:
    base_config |= {"steps": 4000, "checkpoint": {}}
    run_dir = Path(base_config["run_dir"])
    ours, terminal = pty.openpty()
    run = warm_runs.start("train", write_config(base_config), output=os.ttyname(terminal))
    os.close(terminal)
    wait_for(lambda: num_lines(run_dir / "metrics.jsonl") >= 3 or run.poll() is not None, "three steps")
    os.close(ours)
    for _ in range(2):
        os.kill(run.pid, signal.SIGHUP)
        time.sleep(0.1)
    assert run.wait(60) == 128 + signal.SIGHUP
    last = read_metrics(run_dir)[-1]["step"]
    assert (run_dir / f"checkpoints/step-{last:08d}").is_dir()
