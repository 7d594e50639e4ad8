"""Open the backend of a run without data, each time or once for many tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from spurline.config.loading import LoadedConfig, load_config
from spurline.config.run_config import CriticConfig, RunConfig
from spurline.protocols.backend import Backend
from spurline.protocols.collator import ParallelLayout
from spurline_models.optimizers.configs import AdamWConfig
from spurline_rl.losses.configs import ValueLossConfig
from spurline_rl.training_configs import ByPromptConfig


def backend_run(
    model: Path, backend: Mapping[str, Any], plugins: tuple[str, ...] = (), *, critic: bool = False
) -> LoadedConfig:
    """Return the config of a run with this section `backend` and no data, with a critic or without."""
    loaded = load_config(
        {
            "plugins": list(plugins),
            "model": {"path": str(model)},
            "data": {"train": "unused.jsonl"},
            "steps": 8,
            "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1},
            "schedule": {"name": "linear", "warmup_steps": 2},
            "backend": dict(backend),
        }
    )
    if not critic:
        return loaded
    # The config's check wants a source that reads the critic's values, which is not needed here.
    optimizer = AdamWConfig(learning_rate=1e-2)
    section = CriticConfig(loss=ValueLossConfig(), minibatches=ByPromptConfig(), optimizer=optimizer, warmup_steps=2)
    return replace(loaded, config=loaded.config.model_copy(update={"critic": section}))


@contextmanager
def opened(loaded: LoadedConfig) -> Iterator[tuple[Backend, ParallelLayout]]:
    """Open the backend of a run, with the layout that it asks of batches."""
    config, registry = loaded.config, loaded.host.registry
    backend: Backend = registry.create("backend", config.backend, run=config, registry=registry, total_updates=8)
    try:
        yield backend, config.backend.layout()
    finally:
        backend.close()


class KeptBackend:
    """One open backend that is lent to one test after another, for backends that take seconds to start.

    Each test gets it as it was when it was opened, by loading what it saved then. It is replaced for another config,
    and after a test that failed.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._config: RunConfig | None = None
        self._lent: tuple[Backend, ParallelLayout] | None = None
        self._start = Path()

    @contextmanager
    def lend(self, loaded: LoadedConfig) -> Iterator[tuple[Backend, ParallelLayout]]:
        """Lend the backend of this run."""
        if self._lent is None or loaded.config != self._config:
            self.close()
            self._lent = self._stack.enter_context(opened(loaded))
            self._config = loaded.config
            self._start = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="spurline-contract-")))
            self._lent[0].save(self._start)
        else:
            self._lent[0].load(self._start)
        try:
            yield self._lent
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """End the backend that is open; may be called again."""
        self._config = self._lent = None
        self._stack.close()
