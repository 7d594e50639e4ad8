"""The `spurline` command: its group of subcommands, its error messages and its exit codes.

Commands import torch inside their functions, so that `--help` and config errors appear at once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Annotated, Any

import typer
import typer.core

from spurline.errors import SpurlineError, UserError, listing, suggestion
from spurline.plugins.host import PluginHost, installed_commands
from spurline.plugins.listing import plugins
from spurline.plugins.official import install_command, plugin_with
from spurline.run.commands import train
from spurline.terminal import printable

_HELP_WIDTH = 200
"""Characters of a command's summary in `spurline --help`; the formatter wraps it."""


class CommandGroup(typer.core.TyperGroup):
    """Core's commands and those of installed plugins."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(installed_commands())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = installed_commands().get(cmd_name)
        if entry is None:
            known = self.list_commands(ctx)
            is_config = cmd_name.endswith((".yaml", ".yml", ".toml"))
            meant = f" Train it with: spurline train {cmd_name}." if is_config else suggestion(cmd_name, known)
            plugin = plugin_with("command", cmd_name)
            if plugin is not None:
                meant = f" The plugin '{plugin}' has it: {install_command(plugin)}."
            raise UserError(f"spurline has no command '{cmd_name}'.{meant} Commands: {listing(known)}.")
        loaded = entry.load()
        if not isinstance(loaded, typer.Typer):
            function, loaded = loaded, typer.Typer(add_completion=False, rich_markup_mode=None)
            loaded.command(cmd_name)(function)
        return typer.main.get_command(loaded)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands of plugins too, by their docstrings."""
        own = {name: self.get_command(ctx, name).get_short_help_str(_HELP_WIDTH) for name in super().list_commands(ctx)}
        others = {name: entry.summary() for name, entry in sorted(installed_commands().items())}
        with formatter.section("Commands"):
            formatter.write_dl([*own.items(), *others.items()])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            # Typer would end the process without a message.
            raise InterruptedRunError(str(stop) or "Interrupted.") from stop


class InterruptedRunError(SpurlineError):
    """An interruption by Ctrl-C, with a sentence that says what is saved."""

    exit_code = 130


app = typer.Typer(
    cls=CommandGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from spurline import __version__

        typer.echo(f"spurline {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback with every error.")] = False,
) -> None:
    """Spurline: LLM post-training with one loop, strict config and exact resume."""


def schema(
    with_plugin: Annotated[list[str] | None, typer.Option("--plugin", help="Include this plugin's settings.")] = None,
) -> None:
    """Print the JSON schema of the config file, for editors; plugins included."""
    from spurline.config.loading import config_model

    typer.echo(json.dumps(config_model(PluginHost.load(with_plugin or [])).model_json_schema(), indent=2))


for name, command in {"train": train, "plugins": plugins, "schema": schema}.items():
    app.command(name)(command)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and end the process.

    Exit codes: 0 done, 1 the run failed, 2 the user can fix it, 128 + N stopped by signal N.

    Args:
        arguments: Words of the command line; by default those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    # `--debug` is accepted anywhere, since users append it to the command that just failed.
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # Turn off the telemetry of huggingface_hub. It reads this variable on import, in child processes too.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        app(words, standalone_mode=True)
    except SpurlineError as error:
        if debug:
            traceback.print_exc()
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        begin = "" if isinstance(error, InterruptedRunError) else "Error: "
        typer.echo(printable(f"{begin}{error}{notes}"), err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
