"""Disks that are full, clocks that jump, few open files: a run says what is in its way, and goes on where it was."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from run_helpers import assert_same_weights, deterministic, read_metrics

from spurline import Run, load_config
from spurline.errors import SpurlineError

SOAK = bool(os.environ.get("SPURLINE_SOAK"))
MIB = 1 << 20

Resize = Callable[[int], None]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Resize]]:
    """A folder on a disk of its own, and what sets the bytes that it holds."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], check=False).returncode:
        pytest.skip("mounting a disk takes the rights of root")

    def resize(num_bytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={num_bytes}", folder], check=True)

    yield folder, resize
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def async_config(rl_config: dict[str, Any]) -> dict[str, Any]:
    """With a timeline, recorded groups and a report."""
    rl_config["plugins"] = ["async_rl"]
    rl_config["source"] |= {"name": "async_rollouts", "max_staleness": 0, "record_groups": True}
    return rl_config


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["base_config", "async_config"])
def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_space(
    kind: str, request: pytest.FixtureRequest, small_disk: tuple[Path, Resize], tmp_path: Path
) -> None:
    config: dict[str, Any] = request.getfixturevalue(kind)
    folder, resize = small_disk
    whole = config | {"run_dir": str(tmp_path / "whole")}
    Run(load_config(whole)).train()
    sizes = [size * MIB // 8 for size in (range(1, 160, 3) if SOAK else (1, 60, 90))]
    failed = 0
    for size in sizes:
        config["run_dir"] = str(folder / f"run-{size}")
        # A page for the folder itself.
        resize(size)
        try:
            Run(load_config(config)).train()
        except SpurlineError as error:
            failed += 1
            print(size / MIB, error)
            assert str(folder) in str(error)
        resize(1024 * MIB)
        Run(load_config(config)).train()
        assert deterministic(read_metrics(config["run_dir"])) == deterministic(read_metrics(whole["run_dir"]))
        assert_same_weights(Path(config["run_dir"]), Path(whole["run_dir"]))
        subprocess.run(["rm", "-r", config["run_dir"]], check=True)
    assert failed > len(sizes) / 2
