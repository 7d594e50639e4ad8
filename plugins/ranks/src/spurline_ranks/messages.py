"""Turn the settings of a run and its objectives into plain data for ranks, and back.

Configs, losses and plugins are never pickled: a rank validates the settings again, and makes a loss from its settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spurline.config.loading import load_config
from spurline.config.run_config import RunConfig
from spurline.errors import PluginError
from spurline.plugins.registry import Registry
from spurline.protocols.loss import Objective
from spurline_models.trainable import refuse_stateful


def plain_run(run: RunConfig) -> dict[str, Any]:
    """Return the settings as JSON values, with absolute paths."""
    # In a run that was built in Python, the class of a section may differ from the class that its field declares.
    plain = run.model_dump(mode="json", serialize_as_any=True)
    return plain | {"run_dir": str(Path(run.run_dir).absolute())}


def read_run(plain: Mapping[str, Any]) -> tuple[RunConfig, Registry]:
    """Read the settings of `plain_run`, with the run's plugins loaded in this process.

    Raises:
        PluginError, ConfigError: If plugins of the run are missing in this process, or have other versions.
    """
    loaded = load_config(plain, recorded=True)
    return loaded.config, loaded.host.registry


def plain_objective(objective: Objective) -> dict[str, Any]:
    """Return an objective as plain data.

    Raises:
        PluginError: If the loss has no `config`, so that ranks cannot make a copy of the loss.
        ConfigError: If the loss keeps a state.
    """
    loss = objective.loss
    refuse_stateful(loss)
    config: Any = getattr(loss, "config", None)
    if config is None:
        raise PluginError(
            f"The loss {type(loss).__name__} has no attribute `config`, and ranks need it to make the loss. Set "
            "`self.config = config` in its constructor, or choose backend.name: local."
        )
    return {
        "loss": config.model_dump(mode="json", serialize_as_any=True),
        "normalizer": objective.normalizer,
        "temperature": objective.temperature,
    }


def read_objective(plain: Mapping[str, Any], registry: Registry) -> Objective:
    settings = plain["loss"]
    config = registry.get("loss", settings["name"]).config.model_validate(settings)
    return Objective(registry.create("loss", config), plain["normalizer"], plain["temperature"])
