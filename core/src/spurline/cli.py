"""The `spurline` command: its group of subcommands, and the messages and exit codes with which they end.

Longer subcommands live in modules of their own. Heavy libraries are imported inside the commands that need them, so
that `--help` and config errors answer at once.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from spurline.cli_options import load
from spurline.errors import SpurlineError, UserError, listing, suggestion
from spurline.run.commands import train
from spurline.terminal import printable

_UsageError: Any = typer.BadParameter.__base__
"""click's UsageError. It is found through typer, which either bundles click or uses the installed one."""


def _how_to_set(error: Any) -> str:
    """Return a hint at `--set`, if the unknown option or argument may be meant as a setting of the config."""
    command = error.ctx.command if error.ctx is not None else None
    if command is None or all("--set" not in parameter.opts for parameter in command.params):
        return ""
    if set(getattr(error, "possibilities", None) or ()) - {"--help", "--set"}:
        # It is more likely a misspelled option of the command, and click suggests that option.
        return ""
    is_meant = hasattr(error, "option_name") or "unexpected extra argument" in error.message
    return ". A setting of the config is given as: --set KEY=VALUE" if is_meant else ""


_HELP_WIDTH = 200
"""Characters of a command's summary in `spurline --help`; the formatter wraps it."""


class CommandGroup(typer.core.TyperGroup):
    """Core's commands and those of installed plugins, which are imported only when invoked."""

    def list_commands(self, ctx: Any) -> list[str]:
        from spurline.plugins.host import installed_commands

        return [*super().list_commands(ctx), *sorted(installed_commands())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        from spurline.plugins.host import installed_commands
        from spurline.plugins.official import install_command, plugin_with

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
        """List the commands of plugins by their docstrings, without importing their modules."""
        from spurline.plugins.host import installed_commands

        own = {name: self.get_command(ctx, name).get_short_help_str(_HELP_WIDTH) for name in super().list_commands(ctx)}
        others = {name: entry.summary() for name, entry in sorted(installed_commands().items())}
        with formatter.section("Commands"):
            formatter.write_dl([*own.items(), *others.items()])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            error.message += _how_to_set(error)
            raise
        except KeyboardInterrupt as stop:
            # Typer would end the process without a word.
            raise InterruptedRunError(str(stop) or "Interrupted.") from stop


class InterruptedRunError(Exception):
    """An interruption by Ctrl-C, with a sentence that says what is saved."""


app = typer.Typer(
    cls=CommandGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)
plugins_app = typer.Typer(cls=typer.core.TyperGroup, invoke_without_command=True, rich_markup_mode=None)
app.add_typer(plugins_app, name="plugins", help="List plugins, and check that they work together.")


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


@plugins_app.callback()
def plugins(
    ctx: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Also show what the plugins enabled in this config provide.")
    ] = None,
) -> None:
    """List installed plugins from package metadata, and what the enabled ones provide."""
    if ctx.invoked_subcommand is not None:
        return
    from spurline.plugins.listing import enabled_lines, installed_lines

    lines = enabled_lines(load(config, None)) if config is not None else installed_lines()
    typer.echo("\n".join(lines))


@plugins_app.command()
def doctor() -> None:
    """Import every installed plugin, alone and together, and report what does not work. Exit code 2 on any problem."""
    from spurline.plugins.listing import diagnose

    lines, healthy = diagnose()
    typer.echo("\n".join(lines))
    if not healthy:
        raise typer.Exit(2)


def schema(
    with_plugin: Annotated[list[str] | None, typer.Option("--plugin", help="Include this plugin's settings.")] = None,
) -> None:
    """Print the JSON schema of the config file, for editors; plugins included."""
    from spurline.config.loading import config_model
    from spurline.plugins.host import PluginHost

    typer.echo(json.dumps(config_model(PluginHost.load(with_plugin or [])).model_json_schema(), indent=2))


for name, command in {"train": train, "schema": schema}.items():
    app.command(name)(command)


def main(arguments: list[str] | None = None) -> None:
    """Run one command and end the process.

    Exit codes: 0 done, 1 the run failed, 2 the user can fix it, 128 + N stopped by signal N.

    Args:
        arguments: Words of the command line; by default those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    # `--debug` is accepted anywhere, since one adds it to the command that just failed.
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # Downloads would otherwise report what they are for. The library reads this on import, in child processes too.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        app(words, standalone_mode=True)
    except SpurlineError as error:
        if debug:
            traceback.print_exc()
        notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
        typer.echo(printable(f"Error: {error}{notes}"), err=True)
        sys.exit(error.exit_code)
    except InterruptedRunError as stop:
        if debug:
            traceback.print_exc()
        typer.echo(printable(str(stop)), err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
