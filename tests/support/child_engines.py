"""Engines in child processes, weights for them, and ways to see what they leave behind."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from backend_batches import run_config

from spurline.config.run_config import ModelConfig
from spurline_async_rl.engines.child_process import ChildProcessEngine
from spurline_async_rl.engines.configs import ChildProcessEngineConfig
from spurline_async_rl.weights.configs import SharedMemorySyncConfig
from spurline_async_rl.weights.shared_memory import SharedMemorySync
from spurline_rl.protocols.weight_sync import SyncReport
from spurline_rl.testing.engine_update_contract import WeightsOf
from spurline_text.tokenizer import load_tokenizer

ENGINE = "spurline_async_rl.engines.child_process"


def child_engine(
    model: Path, run_dir: Path, *, model_folder: Path | None = None, **settings: Any
) -> ChildProcessEngine:
    """Return an engine with short time limits and many restarts. model_folder: if it is not `model`."""
    limits = {"start_timeout_s": 120.0, "generate_timeout_s": 60.0, "update_timeout_s": 60.0, "pause_timeout_s": 60.0}
    config = ChildProcessEngineConfig(**({"device": "cpu", "max_restarts": 50, **limits} | settings))
    model_config = ModelConfig(path=str(model_folder or model), tokenizer=str(model))
    run = run_config(model, model=model_config, run_dir=run_dir)
    return ChildProcessEngine(config, run=run, tokenizer=load_tokenizer(model_config))


def shared_memory(bucket_bytes: int = 20_000, **settings: Any) -> SharedMemorySync:
    """Return a sync whose buckets are so small that a tiny model takes several."""
    sync = SharedMemorySync(SharedMemorySyncConfig(**settings))
    sync.max_bucket_bytes = bucket_bytes
    return sync


async def publish(engine: Any, version: int, model: Path, sync: Any = None, *, change: Any = None) -> SyncReport:
    """Publish the weights of this folder to an engine, after `change` if it is given."""
    sync = sync or shared_memory()
    try:
        backend: Any = WeightsOf(model, change)
        return await sync.publish(version, backend, [engine])
    finally:
        sync.close()


def engine_processes() -> list[psutil.Process]:
    """Return the child engines on this machine."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        if ENGINE in (process.info["cmdline"] or []):
            found.append(process)
    return found


def engines_of(pid: int) -> list[psutil.Process]:
    return [process for process in engine_processes() if str(pid) in process.info["cmdline"]]


def shared_memory_of(pid: int) -> list[str]:
    """Return the processes that still map memory with weights of this process."""
    found: list[str] = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        # It may have ended meanwhile.
        with suppress(OSError):
            if f"/memfd:spurline-weights-{pid} " in maps.read_text():
                found.append(maps.parent.name)
    return found
