"""Look after the cache of tokenized data.

Mounted by entry point; imports numpy and the cache only inside a command, so that `spurline --help` stays quick.
"""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Look after the cache of tokenized data."
)

CacheDirOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Folder of the cache; default is SPURLINE_CACHE, else ~/.cache/spurline/tokens."),
]
_DAY_S = 86400


@app.command("list")
def list_entries(cache_dir: CacheDirOption = None) -> None:
    """Show the entries and the folder."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from spurline_collation_fast.cache.entry import DamagedEntry, Manifest
    from spurline_collation_fast.cache.folder import entry_paths

    folder = _folder(cache_dir)
    table = Table(box=None)
    for column in ("key", "samples", "tokens", "size", "last used"):
        table.add_column(column, no_wrap=True)
    table.add_column("datasets", overflow="fold")
    total = 0
    paths = entry_paths(folder)
    for path in paths:
        size, used = _num_bytes(path), datetime.fromtimestamp(_last_used(path)).strftime("%Y-%m-%d %H:%M")
        total += size
        try:
            manifest = Manifest.read(path)
            samples, tokens, what = f"{sum(manifest.sizes):,}", f"{manifest.tokens:,}", ", ".join(manifest.labels)
        except DamagedEntry as damage:
            samples, tokens, what = "", "", f"damaged: {damage}"
        except OSError as error:
            samples, tokens, what = "", "", f"cannot be read: {error.strerror or error}"
        table.add_row(path.name[:12], samples, tokens, _size(size), used, escape(what))
    if paths:
        Console().print(table)
    typer.echo(f"{_entries(len(paths))}, {_size(total)} in {folder}")


@app.command()
def verify(cache_dir: CacheDirOption = None) -> None:
    """Read all entries as a whole and remove damaged ones, to be made again.

    Exit code 1 when there is one, or one that cannot be read.
    """
    from spurline_collation_fast.cache.entry import DamagedEntry, check_content, open_entry
    from spurline_collation_fast.cache.folder import entry_paths, remove

    paths, bad = entry_paths(_folder(cache_dir)), set[Path]()
    for path in paths:
        try:
            try:
                open_entry(path)
                check_content(path)
            except DamagedEntry as damage:
                bad.add(path)
                typer.echo(f"{path.name}: damaged: {damage}")
                remove(path)
        except OSError as error:
            bad.add(path)
            typer.echo(f"{path.name}: cannot be read or removed: {error.strerror or error}", err=True)
    typer.echo(f"{_entries(len(paths))} read, {len(paths) - len(bad)} whole")
    if bad:
        raise typer.Exit(1)


@app.command()
def prune(
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Also entries that no run has opened for so long.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Remove entries without a readable manifest, and what killed writers left.

    Runs on this machine keep reading an entry that they have open; one on another machine that shares the folder over
    NFS is killed when its pages go.
    """
    from spurline_collation_fast.cache.entry import DamagedEntry, Manifest
    from spurline_collation_fast.cache.folder import entry_paths, remove, sweep

    folder = _folder(cache_dir)
    sweep(folder)
    freed = failed = 0
    for path in entry_paths(folder):
        size, days = _num_bytes(path), (time.time() - _last_used(path)) / _DAY_S
        reason = f"unused for {days:.0f} days" if everything or (older_than is not None and days > older_than) else None
        try:
            try:
                Manifest.read(path)
            except DamagedEntry as damage:
                reason = f"damaged: {damage}"
            if reason is None:
                continue
            remove(path)
        except OSError as error:
            failed += 1
            typer.echo(f"{path}: cannot be read or removed: {error.strerror or error}", err=True)
            continue
        freed += size
        typer.echo(f"{path.name}  {_size(size)}  {reason}")
    typer.echo(f"{_size(freed)} freed in {folder}")
    if failed:
        raise typer.Exit(1)


def _folder(cache_dir: Path | None) -> Path:
    from spurline_collation_fast.cache.folder import default_cache_folder

    return cache_dir.expanduser() if cache_dir is not None else default_cache_folder()


def _num_bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.glob("*"))


def _last_used(entry: Path) -> float:
    manifest = entry / "manifest.json"
    return (manifest if manifest.exists() else entry).stat().st_mtime


def _entries(number: int) -> str:
    return "1 entry" if number == 1 else f"{number} entries"


def _size(num_bytes: float) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while num_bytes >= 1024 and power < len(units) - 1:
        num_bytes, power = num_bytes / 1024, power + 1
    return f"{num_bytes:.{min(power, 1)}f} {units[power]}"
