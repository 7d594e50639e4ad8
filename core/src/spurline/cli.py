"""The `spurline` command, with the subcommands of core and plugins, error messages and exit codes.

Commands import torch inside their functions, so that `--help` and config errors appear at once.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from spurline.cli_options import ConfigArgument, SetOption, load
from spurline.errors import ConfigError, SpurlineError, UserError, listing, suggestion
from spurline.importing import importing, own_process
from spurline.plugins.host import PluginHost, distribution_of, installed_commands, installed_plugins
from spurline.plugins.official import DEFAULT_PLUGINS, install_command, plugin_with
from spurline.terminal import printable

if TYPE_CHECKING:
    from spurline.run.endings.ending import RunResult

_HELP_WIDTH = 200
"""Maximum length of a command's summary in `spurline --help`, in characters. Help wraps it to the terminal's width."""


class CommandGroup(typer.core.TyperGroup):
    """The commands of core and of installed plugins."""

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
        """List the commands of core and of plugins, each with the first line of its docstring."""
        own = {name: self.get_command(ctx, name).get_short_help_str(_HELP_WIDTH) for name in super().list_commands(ctx)}
        others = {name: _summary(entry) for name, entry in sorted(installed_commands().items())}
        with formatter.section("Commands"):
            formatter.write_dl([*own.items(), *others.items()])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            # Without this, Typer would end the process without a message.
            raise InterruptedRunError(str(stop) or "Interrupted.") from stop


def _summary(entry: EntryPoint) -> str:
    """Return the first line of the docstring of a command or its module, or the error of importing it."""
    try:
        loaded = entry.load()
    except Exception as error:  # noqa: BLE001 - help still lists all other commands
        return f"(of {distribution_of(entry)[0]}, which cannot be imported: {error})"
    text = inspect.getdoc(loaded) if inspect.isfunction(loaded) else sys.modules[entry.module].__doc__
    return (text or "").partition("\n")[0] or f"of {distribution_of(entry)[0]}"


class InterruptedRunError(SpurlineError):
    """Raised after Ctrl-C. The text says what is saved."""

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


@app.command()
def train(
    config: ConfigArgument,
    overrides: SetOption = None,
    resume: Annotated[str, typer.Option(help="auto, never, latest, best, or a checkpoint folder.")] = "auto",
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Let a resume change this setting, e.g. optimizer.learning_rate."),
    ] = None,
) -> None:
    """Train the run that a config describes, or continue it."""
    loaded = load(config, overrides)
    from spurline.trackers.start_lines import StartLines, banner

    start = StartLines()
    start.show(banner(loaded))
    start("loading PyTorch and transformers")
    with importing():
        from spurline.run.run import Run

        for kind in ("source", "loss", "backend"):
            loaded.host.registry.factory(kind, getattr(loaded.config, kind))

    try:
        result = Run(loaded, resume, allow_change or (), start).train()
    except ConfigError as error:
        raise error.in_file(loaded.origin) from error
    print_result(result)
    # A signal after the last step does not change the exit code.
    if result.signal is not None and result.status == "stopped":
        raise typer.Exit(128 + result.signal)


def print_result(result: RunResult) -> None:
    """Print how a run ended, its scores, and what it wrote."""
    from spurline.trackers.readout import scores_of

    if result.status == "finished" and not result.metrics:
        early = f" early: {result.stop_reason}" if result.stop_reason else ""
        fix = "Change or remove stop_when" if early else "Raise steps or epochs"
        where = f"{printable(early)} at step {result.step:,}"
        typer.echo(f"Nothing to do: the run already finished{where}. {fix} to go on.")
    else:
        finished = "Finished early" if result.stop_reason else "Finished"
        verb = finished if result.status == "finished" else "Stopped on request"
        why = f": {result.stop_reason}" if result.stop_reason else ""
        typer.echo(f"{verb} at step {result.step:,}{printable(why)}{', with warnings:' if result.warnings else '.'}")
        for warning in result.warnings:
            typer.echo(printable(f"  - {warning}"))
    scores = scores_of(result.metrics)
    if scores:
        shown = (f"{name.removeprefix('eval/')} {value:.4g}" for name, value in scores.items())
        typer.echo(f"  held-out: {', '.join(shown)}")
    if result.best is not None:
        best = "  best: {metric} {value:.4g} at step {step:,}".format_map(result.best)
        if result.model is not None and result.best["step"] != result.step:
            best += ". The model below is of another step. Export the best one with: "
            best += f"spurline export {result.model.parent} OUT --checkpoint best"
        typer.echo(best)
    written = {"checkpoint": result.checkpoint, "model": result.model, "adapter": result.adapter, **result.files}
    for name, path in written.items():
        if path is not None:
            typer.echo(f"  {name}: {path}")
    if result.status == "stopped":
        typer.echo(result.go_on)


@app.command()
def plugins(
    config: Annotated[Path | None, typer.Option(help="Show what the plugins that this config enables provide.")] = None,
) -> None:
    """List the installed plugins, or with --config, what each enabled plugin of a config provides."""
    if config is not None:
        host = load(config, None).host
        lines = [line for name in host.plugins for line in _contents(host, name)]
    else:
        lines = [
            f"{name}  {plugin.version}  ({plugin.distribution}{', by default' if name in DEFAULT_PLUGINS else ''})"
            for name, plugin in sorted(installed_plugins().items())
        ]
        lines.append("Enable one with `plugins: [NAME]` in the config; leave a default one out with -NAME.")
    typer.echo("\n".join(lines))


def _contents(host: PluginHost, name: str) -> Iterator[str]:
    plugin = host.plugins[name]
    commands = [each.name for each in installed_commands().values() if distribution_of(each)[0] == plugin.distribution]
    hooks = [hook for hook in plugin.hooks if hook != "register_components"]
    yield f"{name}  {plugin.version}  ({plugin.distribution})"
    provided: dict[str, list[str]] = {}
    for entry in host.registry.entries(name):
        provided.setdefault(entry.kind, []).append(entry.name)
    for label, values in {**provided, "hooks": hooks, "commands": commands}.items():
        if values:
            yield f"  {label}: {', '.join(values)}"


@app.command()
def schema(
    with_plugin: Annotated[list[str] | None, typer.Option("--plugin", help="Include this plugin's settings.")] = None,
) -> None:
    """Print the JSON schema of the config file, including the sections of plugins, for editors."""
    from spurline.config.loading import config_model

    typer.echo(json.dumps(config_model(PluginHost.load(with_plugin or [])).model_json_schema(), indent=2))


def main(arguments: list[str] | None = None) -> None:
    """Run one command and end the process.

    Exit codes: 0 done, 1 the run failed, 2 an error that the user can fix, 128 + N stopped by signal N.

    Args:
        arguments: Words after `spurline`. The default is the command line of this process.
    """
    if arguments is None:
        own_process()
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
