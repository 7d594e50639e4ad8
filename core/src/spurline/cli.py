"""The `spurline` command: parse, build, run.

Heavy libraries are imported inside the commands that need them, so that `--help` and config errors answer at once.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import sys
import threading
import traceback
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
import typer.core

from spurline.errors import ConfigError, SpurlineError, UserError, listing, suggestion
from spurline.importing import importing
from spurline.terminal import is_person_asking, printable

if TYPE_CHECKING:
    from spurline.config.loading import LoadedConfig
    from spurline.protocols.backend import Finding
    from spurline.run.run import RunResult


def _no_config() -> Path:
    raise UserError("which config? Give its file, such as run.yaml. `spurline init` writes one for a model and data.")


ConfigArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="Run config: a YAML file, or TOML by suffix.",
        default_factory=_no_config,
        show_default=False,
    ),
]
RunDirArgument = Annotated[Path, typer.Argument(help="Folder of a run, with its config.json.")]


def _check_overrides(overrides: list[str] | None) -> list[str] | None:
    """Refuse `--set steps 5` by what it means, before the left over `5` is refused without saying why."""
    for override in overrides or ():
        if "=" not in override:
            raise UserError(
                f"--set: '{override}' is not KEY=VALUE, such as '{override or 'steps'}=5', without a space."
            )
    return overrides


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a setting, e.g. optimizer.learning_rate=1e-4.",
        callback=_check_overrides,
    ),
]


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

        entry = installed_commands().get(cmd_name)
        if entry is None:
            known = self.list_commands(ctx)
            raise UserError(
                f"spurline has no command '{cmd_name}'.{suggestion(cmd_name, known)} Commands: {listing(known)}."
            )
        return typer.main.get_command(entry.load())

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            # Typer would end the process without a word.
            raise InterruptedRunError(str(stop) or "Interrupted.") from stop


class InterruptedRunError(Exception):
    """Ctrl-C, with what a person should know about it."""


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


@app.command()
def train(
    config: ConfigArgument,
    overrides: SetOption = None,
    resume: Annotated[str, typer.Option(help="auto, never, or the path of a checkpoint folder.")] = "auto",
    allow_change: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY", help="Let a resume change this setting, e.g. optimizer.learning_rate."),
    ] = None,
) -> None:
    """Train, or continue training, what the config describes."""
    loaded = _load(config, overrides)
    from spurline.trackers.start_lines import StartLines, banner

    start = StartLines.of(loaded)
    start.show(banner(loaded))
    start("loading PyTorch and transformers")
    with _importing():
        from spurline.run.run import Run

    try:
        result = Run(loaded, resume, allow_change or (), start).train()
    except ConfigError as error:
        raise error.in_file(loaded.origin) from error
    _print_result(result)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


@app.command()
def plan(
    config: ConfigArgument,
    overrides: SetOption = None,
    gpu_gib: Annotated[
        float | None, typer.Option(metavar="GIB", min=1, help="Memory of the GPUs, where the run trains elsewhere.")
    ] = None,
) -> None:
    """Check config, data and memory, and say what training would do. Exit code 2 on any problem."""
    loaded = _load(config, overrides)
    from spurline.trackers.start_lines import StartLines

    start = StartLines.of(loaded)
    start("loading PyTorch and transformers")
    with _importing():
        from spurline.run.plan import make_plan

    made = make_plan(loaded, progress=start, device_bytes=None if gpu_gib is None else int(gpu_gib * 2**30))
    for heading, lines in made.sections.items():
        typer.echo(f"{heading}:")
        for line in lines:
            typer.echo(printable(f"  {line}"))
    for problem in made.problems:
        typer.echo(printable(f"Error: {problem}"), err=True)
    if made.problems:
        raise typer.Exit(2)
    sets = "".join(f" --set {shlex.quote(override)}" for override in overrides or ())
    typer.echo(f"No problems found. Train with: spurline train {shlex.quote(str(config))}{sets}")


@app.command()
def data(
    config: ConfigArgument,
    overrides: SetOption = None,
    rows: Annotated[int, typer.Option(metavar="N", min=1, help="How many rows, or prompts, are shown.")] = 3,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write an HTML page instead; it shows every token.")
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Read all of large data, as training does.")] = False,
) -> None:
    """Show the first rows as they will be trained: every token, which are trained, what was cut or left out."""
    loaded = _load(config, overrides)
    from spurline.trackers.start_lines import StartLines

    start = StartLines.of(loaded)
    start("loading PyTorch and transformers")
    with _importing():
        from spurline.run.shown_data.page import write_page
        from spurline.run.shown_data.sequences import ROW_LIMIT, show_data
        from spurline.run.shown_data.terminal import print_data

    try:
        shown = show_data(loaded, rows, None if whole else ROW_LIMIT, start)
    except ConfigError as error:
        raise error.in_file(loaded.origin) from error
    if html is None:
        print_data(shown, sys.stdout)
    else:
        write_page(shown, html)
        typer.echo(html)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to write the config.")] = Path("run.yaml"),
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Folder of a model, or its name on the hub.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="DATA", help="Training rows: a file, a folder, a hub name.")
    ] = None,
    task: Annotated[
        str | None, typer.Option(metavar="sft|dpo|rl|async", help="What to train; otherwise the rows decide.")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="NAME=COLUMN", help="What a column is; otherwise guessed.")
    ] = None,
    held_out: Annotated[str | None, typer.Option("--eval", metavar="DATA", help="Held-out rows.")] = None,
    reward: Annotated[str | None, typer.Option(metavar="REWARD", help="For rl: a name, or file.py:function.")] = None,
    lora: Annotated[bool | None, typer.Option("--lora/--no-lora", help="Train adapters, or all weights.")] = None,
    epochs: Annotated[float | None, typer.Option(metavar="N", help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing; take what is usual.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file that is there.")] = False,
    no_plan: Annotated[bool, typer.Option("--no-plan", help="Do not plan the run that was written.")] = False,
) -> None:
    """Write a commented config for a model and data, and plan it. Asks for what is not given."""
    tasks = ("sft", "dpo", "rl", "async")
    if task not in (None, *tasks):
        raise UserError(f"--task {task}: is none of {', '.join(tasks)}.{suggestion(str(task), tasks)}")
    columns = _columns(column or [])
    from spurline.trackers.start_lines import StartLines

    start = StartLines(quiet=False)
    start("loading PyTorch and transformers")
    with _importing():
        from spurline.first_config.command import Wishes, write_first_config

    wishes = Wishes(model, data, cast(Any, task), held_out, reward, lora, epochs, steps, columns)
    for line in write_first_config(file, wishes, start, force=force, may_ask=not yes):
        typer.echo(line)
    typer.echo(f"Wrote {file}.")
    if not no_plan:
        plan(file)


@app.command(name="doctor")
def diagnose_run(
    config: ConfigArgument,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON.")] = False,
) -> None:
    """Look at machine, folders, devices and ranks as a run would meet them. Exit code 2 on any problem."""
    loaded = _load(config, overrides)
    from spurline.trackers.start_lines import StartLines

    StartLines.of(loaded)("loading PyTorch and transformers")
    with _importing():
        from spurline.run.doctor import find

    findings: list[Finding] = []
    for finding in find(loaded):
        findings.append(finding)
        if not as_json:
            typer.echo(f"{'problem' if finding.fix else 'ok':8} {finding.what}: {finding.value}")
            if finding.fix:
                typer.echo(f"{'':8} fix: {finding.fix}")
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    if any(finding.fix for finding in findings):
        raise typer.Exit(2)


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

    lines = enabled_lines(_load(config, None)) if config is not None else installed_lines()
    typer.echo("\n".join(lines))


@plugins_app.command()
def doctor() -> None:
    """Import every installed plugin, alone and together, and report what does not work. Exit code 2 on any problem."""
    from spurline.plugins.listing import diagnose

    lines, healthy = diagnose()
    typer.echo("\n".join(lines))
    if not healthy:
        raise typer.Exit(2)


@app.command()
def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or going on.")],
    out: Annotated[
        Path | None, typer.Option(help="Where a comparison is written; comparison.html in this folder if not given.")
    ] = None,
) -> None:
    """Write RUN_DIR/report.html from the metrics so far, also while the run is going on. Several runs are compared."""
    from spurline.report.page import write_run_report
    from spurline.run.directory import RunDirectory

    if len(run_dirs) > 1:
        from spurline.report.comparison import COMPARISON_FILE, write_comparison

        typer.echo(write_comparison(run_dirs, out or Path(COMPARISON_FILE)))
        return
    if out is not None:
        raise UserError("--out is for a comparison of several runs: the report of one is RUN_DIR/report.html.")
    typer.echo(write_run_report(_load_run(run_dirs[0]), RunDirectory(run_dirs[0])))


@app.command()
def view(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or going on.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen on 127.0.0.1; 0 for a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Print the address, and open no browser.")] = False,
) -> None:
    """Serve a local page over runs: curves, evaluations, rollouts token by token. Ends at Ctrl-C; writes nothing."""
    from spurline.view.server import serve

    serve(run_dirs, port, opens_browser=not no_open, say=typer.echo)


@app.command()
def export(
    run_dir: RunDirArgument,
    out: Annotated[Path, typer.Argument(help="Folder to write; `from_pretrained` loads it.")],
    checkpoint: Annotated[str, typer.Option(help="latest, best, or the path of a checkpoint folder.")] = "latest",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Only the LoRA adapter, as a folder for PEFT; else it is merged.")
    ] = False,
) -> None:
    """Write a Hugging Face model folder from a run's checkpoint."""
    loaded = _load_run(run_dir)
    with _importing():
        from spurline.run.export import export_run

    typer.echo(export_run(loaded, out, checkpoint, adapter=adapter))


@app.command()
def generate(
    target: Annotated[str, typer.Argument(help="Folder of a run, or of a model, or a model's name on the hub.")],
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="[PROMPT]...", help="Without one: standard input, or a conversation.")
    ] = None,
    file: Annotated[
        str | None, typer.Option(metavar="DATA", help="Rows of prompts: what `data.train` takes, in any format.")
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="Of --file: which column is `prompt`, `messages`, ..."),
    ] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Of a run: latest, best, or the path of a checkpoint folder.")
    ] = "latest",
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Go on from plain text, without a chat template.")] = False,
    max_new_tokens: Annotated[int | None, typer.Option(metavar="N", help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option(metavar="T", help="0 takes the likeliest token.")] = None,
    top_p: Annotated[float | None, typer.Option(metavar="P")] = None,
    top_k: Annotated[int | None, typer.Option(metavar="K")] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends an answer; may be given again.")] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="Answers to each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print an object for each answer.")] = False,
) -> None:
    """Answer prompts with a run's checkpoint or a model; how a run samples is what answers are sampled with."""
    from spurline.trackers.start_lines import StartLines

    given = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    chosen = {name: value for name, value in given.items() if value is not None}
    if column and file is None:
        raise UserError("--column says what columns of --file are called. Give --file as well.")
    columns = _columns(column or [])
    start = StartLines(quiet=as_json)
    start("loading PyTorch and transformers")
    with _importing():
        from spurline.answering import command

    found = command.opened(target, _load_run, checkpoint, start)
    sampling = replace(found.sampling, **chosen, **({"stop": tuple(stop)} if stop else {}))
    asked = command.Prompts(found, system, raw=raw)
    typer.echo(printable(f"{found.words}: {sampling.words()}"), err=True)
    if not prompts and file is None and is_person_asking():
        if as_json or raw or count > 1:
            raise UserError("a conversation in the terminal has no --json, --raw or -n. Give a prompt, or --file.")
        command.talk(found, asked, sampling, seed)
        return
    texts = [command.text_of_input() if text == "-" else text for text in prompts or ()]
    texts = texts or ([] if file is not None else [command.text_of_input()])
    every = [(text, asked.of_text(text)) for text in texts]
    every += [] if file is None else asked.of_file(file, columns)
    command.answer_all(found, every, sampling, count=count, seed=seed, as_json=as_json)


def _columns(given: list[str]) -> dict[str, str]:
    """`DatasetConfig.columns` out of `--column` options."""
    columns = {item.partition("=")[0]: item.partition("=")[2] for item in given}
    if not all(name and column for name, column in columns.items()):
        raise UserError("--column is NAME=COLUMN, such as --column prompt=question: the name that is expected first.")
    return columns


@app.command()
def schema(
    with_plugin: Annotated[list[str] | None, typer.Option("--plugin", help="Include this plugin's settings.")] = None,
) -> None:
    """Print the JSON schema of the config file, for editors; plugins included."""
    from spurline.config.loading import config_model
    from spurline.plugins.host import PluginHost

    typer.echo(json.dumps(config_model(PluginHost.load(with_plugin or [])).model_json_schema(), indent=2))


def _importing() -> AbstractContextManager[None]:
    """What is imported here stays for good, unless a program called the command: its garbage would stay as well."""
    return importing(for_good=_OWNS_PROCESS.get())


_OWNS_PROCESS = ContextVar("_OWNS_PROCESS", default=False)


def _load(config: Path, overrides: list[str] | None) -> LoadedConfig:
    with importing():
        from spurline.config.loading import load_config

        return load_config(config, overrides or [])


def _load_run(run_dir: Path) -> LoadedConfig:
    """The config of a finished or running run, its run_dir being the folder given (it may have been moved)."""
    from spurline.config.loading import load_config

    path = run_dir / "config.json"
    if not path.is_file():
        raise UserError(
            f"{run_dir} is not a run directory: it has no config.json. Give the `run_dir` of a training run."
        )
    return load_config({**json.loads(path.read_text(encoding="utf-8")), "run_dir": str(run_dir)}, recorded=True)


def _print_result(result: RunResult) -> None:
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
    from spurline.trackers.readout import scores_of

    scores = scores_of(result.metrics)
    if scores:
        typer.echo(
            "  held-out: " + ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in scores.items())
        )
    if result.best is not None:
        typer.echo("  best: {metric} {value:.4g} at step {step:,}".format_map(result.best))
    for name, path in (("checkpoint", result.checkpoint), ("report", result.report)):
        if path is not None:
            typer.echo(f"  {name}: {path}")
    if result.status == "stopped":
        typer.echo(result.go_on)


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 the run failed, 2 the user can fix it, 128 + N stopped by signal N.

    arguments: those of this process by default, which then ends at a second signal, whatever it is doing, and here.
    """
    try:
        _run_command(arguments)
    except SystemExit as end:
        if arguments is None and (end.code is None or isinstance(end.code, int)):
            _leave(end.code or 0)
        raise


def _leave(code: int) -> None:
    """End the process as Python does, but for taking apart what was imported, which takes torch a second.

    Returns where something watches the process, or the output cannot be written: Python then ends it.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    watched = sys.getprofile() or sys.gettrace() or (monitoring and any(map(monitoring.get_tool, range(6))))
    if "torch" not in sys.modules or watched or sys.flags.inspect:
        return
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue] - joins threads, and ends pools of them
    atexit._run_exitfuncs()
    try:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def _run_command(arguments: list[str] | None) -> None:
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        _OWNS_PROCESS.set(True)
        _end_at_second_signal()
    # `--debug` is accepted anywhere, since one adds it to the command that just failed.
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    # Downloads would otherwise tell what they are for; read when the library is imported, here and in child processes.
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


def _end_at_second_signal() -> None:
    from spurline.run.second_signal import end_at_second_signal

    try:
        end_at_second_signal()
    except OSError as error:
        typer.echo(f"Warning: what hangs can be ended by SIGKILL only, as no process can be started: {error}", err=True)


if __name__ == "__main__":
    main()
