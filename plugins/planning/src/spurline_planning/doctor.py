"""Check machine, folders, devices and ranks before a run, for `spurline doctor RUN.yaml`.

The checks come in the order in which a run would meet problems. No weights are loaded. A backend with ranks starts its
ranks, and adds their findings.
"""

from __future__ import annotations

import fcntl
import platform
import resource
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from spurline.config.loading import LoadedConfig
from spurline.config.run_config import RunConfig
from spurline.errors import ConfigError, UserError
from spurline.files import scratch_inside
from spurline.trackers.readout import quantity
from spurline_models.architecture import load_model_config
from spurline_models.machine import Finding, memory_bytes, num_cores
from spurline_models.memory import count_parameters
from spurline_models.weight_files import check_weight_files
from spurline_planning.fit import gib
from spurline_planning.protocols import Diagnoses

OPEN_FILES = 4096
"""Open files that a run may need: sockets of engines and ranks, memory-mapped data, shards of weights."""

SHARED_MEMORY = 2**30
"""Bytes of /dev/shm that NCCL may need between the ranks of one machine."""

FREE_DISK = 2**30


def find(loaded: LoadedConfig) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. Problems are findings with a fix, and are never raised."""
    config = loaded.config
    yield _versions(loaded)
    yield from _machine()
    request = config.backend.rank_request()
    if request is None:
        yield from _devices()
    elif request.device == "cuda":
        yield from _shared_memory()
    yield from _run_dir(config.run_dir)
    yield from _model(config, loaded.origin)
    if isinstance(config.backend, Diagnoses):
        yield from config.backend.doctor(config)


def _versions(loaded: LoadedConfig) -> Finding:
    plugins = [f"{name} {plugin.version}" for name, plugin in loaded.host.plugins.items()]
    libraries = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    return Finding("versions", ", ".join([f"Python {platform.python_version()}", *plugins, *libraries]))


def _machine() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES
    shown = "without limit" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    yield Finding("open files", shown, f"run `ulimit -n {min(OPEN_FILES, hard)}` before the run" if few else "")
    yield Finding("memory", f"{gib(memory_bytes())}, {num_cores()} cores")


def _shared_memory() -> Iterator[Finding]:
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        small = free < SHARED_MEMORY
        fix = "give the container more shared memory, as with `docker run --shm-size=8g`, or delete files in /dev/shm"
        yield Finding(str(shared), f"{gib(free)} free for NCCL between ranks of a machine", fix if small else "")


def _devices() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPUs", "torch sees none: the run trains on the CPU")
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        fix = "end other programs on this GPU: see `nvidia-smi`" if free < total // 2 else ""
        yield Finding(f"GPU {index}", f"{torch.cuda.get_device_name(index)}, {gib(free)} of {gib(total)} free", fix)


def _run_dir(path: Path) -> Iterator[Finding]:
    try:
        with scratch_inside(path) as scratch, (scratch / "file").open("wb") as file:
            file.write(b"written by spurline doctor")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = shutil.disk_usage(path).free
    except OSError as error:
        fix = "choose another folder: --set run_dir=PATH, or change the permissions of this one"
        yield Finding("run_dir", f"{path}: {error.strerror or error}", fix)
        return
    fix = "free some space for checkpoints, or choose another run_dir" if free < FREE_DISK else ""
    yield Finding("run_dir", f"{path} can be written and locked, {gib(free)} free", fix)


def _model(config: RunConfig, origin: str) -> Iterator[Finding]:
    try:
        check_weight_files(config.model)
        architecture = load_model_config(config.model)
        size = quantity(count_parameters(config.model))
        config.backend.check_model(config)
    except UserError as problem:
        located = problem.in_file(origin) if isinstance(problem, ConfigError) else problem
        yield Finding("model", str(config.model.path), str(located))
    else:
        yield Finding("model", f"{config.model.path}: {type(architecture).__name__}, {size} parameters")
