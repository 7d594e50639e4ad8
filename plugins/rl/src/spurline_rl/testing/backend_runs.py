"""Open a backend for one test, or once for many tests. Its run has no data."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from spurline.config.loading import LoadedConfig, load_config
from spurline.config.run_config import CriticConfig, RunConfig
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_models.optimizers.configs import AdamWConfig
from spurline_rl.losses.configs import ValueLossConfig
from spurline_rl.training_configs import ByPromptConfig


def backend_run(
    model: Path, backend: Mapping[str, Any], plugins: tuple[str, ...] = (), *, critic: bool = False, **of_model: Any
) -> LoadedConfig:
    """Return the config of a run that has no data and this `backend` section. `of_model` are fields of `model`."""
    loaded = load_config(
        {
            "plugins": list(plugins),
            "model": {"path": str(model), **of_model},
            "data": {"train": "unused.jsonl"},
            "steps": 8,
            "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
            "schedule": {"name": "linear", "warmup_steps": 2},
            "backend": dict(backend),
        },
        # Nothing in this run uses the frozen models, which config validation would refuse.
        recorded="frozen" in of_model,
    )
    if not critic:
        return loaded
    # Config validation requires a source that uses the critic, so the critic is added after validation.
    optimizer = AdamWConfig(learning_rate=1e-2)
    section = CriticConfig(loss=ValueLossConfig(), minibatches=ByPromptConfig(), optimizer=optimizer, warmup_steps=2)
    return replace(loaded, config=loaded.config.model_copy(update={"critic": section}))


@contextmanager
def opened(loaded: LoadedConfig) -> Iterator[tuple[Backend, ParallelLayout]]:
    """Open the backend of a run. Yields it and the parallel layout for which its batches must be made."""
    config, registry = loaded.config, loaded.host.registry
    backend: Backend = registry.create("backend", config.backend, run=config, registry=registry, total_updates=8)
    try:
        yield backend, config.backend.layout()
    finally:
        backend.close()


class KeptBackends:
    """Keeps backends open for many tests, one for each config, because some backends take seconds to start.

    The initial state of a backend is saved, and is loaded before each later test. If a test fails, the next test with
    this config opens a new backend.
    """

    def __init__(self) -> None:
        self._kept: list[_Kept] = []

    @contextmanager
    def lend(self, loaded: LoadedConfig) -> Iterator[tuple[Backend, ParallelLayout]]:
        kept = next((kept for kept in self._kept if kept.config == loaded.config), None)
        was_lent = kept is not None
        if kept is None:
            with ExitStack() as stack:
                lent = stack.enter_context(opened(loaded))
                start = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="spurline-contract-")))
                lent[0].save(start)
                kept = _Kept(loaded.config, lent, start, stack.pop_all())
            self._kept.append(kept)
        try:
            if was_lent:
                kept.lent[0].load(kept.start)
            yield kept.lent
        except pytest.skip.Exception:
            raise
        except BaseException:
            # A test that failed or ran out of time may have left the backend in any state.
            self._kept.remove(kept)
            kept.stack.close()
            raise

    def close(self) -> None:
        while self._kept:
            self._kept.pop().stack.close()


@dataclass(frozen=True, eq=False)
class _Kept:
    config: RunConfig
    lent: tuple[Backend, ParallelLayout]
    start: Path
    stack: ExitStack
