"""Define arguments and options that several commands take, and load the config that the user names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spurline.errors import UserError
from spurline.importing import importing

if TYPE_CHECKING:
    from spurline.config.loading import LoadedConfig


def _no_config() -> Path:
    raise UserError("Give a config file, such as run.yaml. `spurline init` writes one for a model and data.")


ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="Run config: a YAML file, or a TOML file if its name ends in .toml.",
        default_factory=_no_config,
        show_default=False,
    ),
]
RunDirArgument = Annotated[Path, typer.Argument(help="Folder of a run, with its config.json.")]


SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. optimizer.learning_rate=1e-4."),
]


def load(config: Path, overrides: list[str] | None) -> LoadedConfig:
    """Load a config file, and apply the overrides of `--set`."""
    with importing():
        from spurline.config.loading import load_config

        return load_config(config, overrides or [])


def load_run(run_dir: Path) -> LoadedConfig:
    """Load the config that a run recorded, with `run_dir` set to this folder, since the folder may have been moved."""
    from spurline.config.loading import load_config
    from spurline.run.directory import CONFIG_FILE, check_run_directory, read_mapping

    check_run_directory(run_dir)
    settings = read_mapping(run_dir / CONFIG_FILE)
    if not settings:
        raise UserError(f"{run_dir} is not a run directory: it has no {CONFIG_FILE}.")
    return load_config({**settings, "run_dir": str(run_dir)}, recorded=True)
