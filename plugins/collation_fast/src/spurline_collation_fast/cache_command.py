"""Look after the cache of tokenized data.

Mounted by entry point; imports numpy and the cache only inside a command, so that `spurline --help` stays quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from spurline_collation_fast.cache.upkeep import Entry

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Look after the cache of tokenized data."
)

CacheDirOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Folder of the cache; default is SPURLINE_CACHE, else ~/.cache/spurline/tokens."),
]


@app.command("path")
def print_path(cache_dir: CacheDirOption = None) -> None:
    """Print the folder of the cache."""
    typer.echo(_folder(cache_dir))


@app.command("list")
def list_entries(cache_dir: CacheDirOption = None) -> None:
    """Show the entries, the last used first."""
    from rich.console import Console
    from rich.table import Table

    from spurline_collation_fast.cache.upkeep import entries

    folder = _folder(cache_dir)
    found = entries(folder)
    if found:
        table = Table(box=None)
        for column in ("key", "samples", "tokens", "size", "created", "last used"):
            table.add_column(column, no_wrap=True)
        table.add_column("datasets", overflow="fold")
        for entry in found:
            table.add_row(*_row(entry))
        Console().print(table)
    typer.echo(f"{_entries(len(found))}, {_size(sum(entry.num_bytes for entry in found))} in {folder}")


@app.command()
def verify(
    key: Annotated[str | None, typer.Argument(help="Key of an entry, or its beginning; default is all.")] = None,
    cache_dir: CacheDirOption = None,
) -> None:
    """Read entries as a whole and remove damaged ones, to be made again.

    Exit code 1 when there is one, or one that cannot be read.
    """
    from spurline.errors import UserError, listing
    from spurline_collation_fast.cache.upkeep import damage, entries, remove

    folder = _folder(cache_dir)
    known = [entry.path for entry in entries(folder)]
    chosen = [path for path in known if path.name.startswith(key or "")]
    if key and not chosen:
        raise UserError(f"{folder} has no entry {key}. Entries: {listing(path.name for path in known)}.")
    bad = 0
    for path in chosen:
        try:
            found = damage(path)
            if found is not None:
                remove(path)
        except OSError as error:
            bad += 1
            typer.echo(f"{path.name}: cannot be read or removed: {error.strerror or error}", err=True)
            continue
        bad += found is not None
        typer.echo(f"{path.name}: {'whole' if found is None else f'damaged, and removed: {found}'}")
    typer.echo(f"{_entries(len(chosen))} read, {len(chosen) - bad} whole")
    if bad:
        raise typer.Exit(1)


@app.command()
def prune(
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Also entries that no run has opened for so long.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Remove damaged entries, and what killed writers left.

    Runs on this machine keep reading an entry that they have open; one on another machine that shares the folder over
    NFS is killed when its pages go.
    """
    from spurline_collation_fast.cache.upkeep import entries, remove, sweep

    folder = _folder(cache_dir)
    if not dry_run:
        sweep(folder)
    freed = failed = 0
    for entry in entries(folder):
        unused = older_than is not None and entry.days_unused > older_than
        if not (everything or unused or entry.is_damaged):
            continue
        if not dry_run:
            try:
                remove(entry.path)
            except OSError as error:
                failed += 1
                typer.echo(f"{entry.path}: cannot be removed: {error.strerror or error}", err=True)
                continue
        freed += entry.num_bytes
        reason = entry.problem or f"unused for {entry.days_unused:.0f} days"
        typer.echo(f"{entry.path.name}  {_size(entry.num_bytes)}  {reason}")
    typer.echo(f"{_size(freed)} {'would be freed' if dry_run else 'freed'} in {folder}")
    if failed:
        raise typer.Exit(1)


def _folder(cache_dir: Path | None) -> Path:
    from spurline_collation_fast.cache.folder import default_cache_folder

    return cache_dir.expanduser() if cache_dir is not None else default_cache_folder()


def _row(entry: Entry) -> list[str]:
    from datetime import datetime

    from rich.markup import escape

    last_used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
    manifest = entry.manifest
    if manifest is None:
        return [entry.path.name[:12], "", "", _size(entry.num_bytes), "", last_used, escape(entry.problem or "")]
    created = datetime.fromisoformat(manifest.created).astimezone().strftime("%Y-%m-%d %H:%M")
    return [
        entry.path.name[:12],
        f"{manifest.samples:,}",
        f"{manifest.tokens:,}",
        _size(entry.num_bytes),
        created,
        last_used,
        escape(", ".join(manifest.labels)),
    ]


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"


def _size(num_bytes: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while num_bytes >= 1024 and power < len(units) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.{min(power, 1)}f} {units[power]}"
