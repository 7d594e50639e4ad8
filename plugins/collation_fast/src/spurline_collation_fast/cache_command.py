"""Commands that list, check and clean the cache of tokenized data.

An entry point adds the commands to `spurline`. numpy and the cache are imported only inside a command, so
`spurline --help` stays quick.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from spurline.terminal import printable

app = typer.Typer(
    add_completion=False, no_args_is_help=True, rich_markup_mode=None, help="Manage the cache of tokenized data."
)

CacheDirOption = Annotated[
    Path | None,
    typer.Option("--cache-dir", help="Folder of the cache. Default: SPURLINE_CACHE, else ~/.cache/spurline/tokens."),
]
_DAY_S = 86400


@app.command("list")
def list_entries(cache_dir: CacheDirOption = None) -> None:
    """Show the entries of the cache, and its folder."""
    from spurline_collation_fast.cache.entry import DamagedEntry, Manifest
    from spurline_collation_fast.cache.folder import entry_paths

    folder = _folder(cache_dir)
    paths = entry_paths(folder)
    for path in paths:
        try:
            facts = Manifest.read(path).summary
            what = f"{facts['samples']:,} samples, {facts['tokens']:,} tokens of {', '.join(facts['sources'])}"
        except DamagedEntry as damage:
            what = f"damaged: {damage}"
        except OSError as error:
            what = f"cannot be read: {error.strerror or error}"
        used = datetime.fromtimestamp(_last_used(path)).strftime("%Y-%m-%d %H:%M")
        typer.echo(printable(f"{path.name[:12]}  used {used}  {_size(_num_bytes(path)):>12}  {what}"))
    typer.echo(f"{len(paths)} entries, {_size(sum(map(_num_bytes, paths)))} in {folder}")


@app.command()
def verify(cache_dir: CacheDirOption = None) -> None:
    """Read all entries completely, and remove damaged ones. A run that needs a removed entry makes it again.

    The exit code is 1 if an entry is damaged or cannot be read.
    """
    from spurline_collation_fast.cache.entry import open_entry

    def check(path: Path) -> None:
        open_entry(path, whole=True)

    count, removed, _, failed = _remove_where(_folder(cache_dir), check)
    bad = removed + failed
    typer.echo(f"{count} entries read, {count - bad} whole")
    if bad:
        raise typer.Exit(1)


@app.command()
def prune(
    older_than: Annotated[
        float | None, typer.Option(min=0, metavar="DAYS", help="Also remove entries unused for this many days.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all entries.")] = False,
    cache_dir: CacheDirOption = None,
) -> None:
    """Remove entries without a readable manifest, and the files of killed writers.

    A run on this machine can still read a removed entry that it has open. A run on another machine that reads a removed
    entry over NFS is killed.
    """
    from spurline_collation_fast.cache.entry import Manifest
    from spurline_collation_fast.cache.folder import sweep

    def reason(path: Path) -> str | None:
        Manifest.read(path)
        days = (time.time() - _last_used(path)) / _DAY_S
        return f"unused for {days:.0f} days" if everything or (older_than is not None and days > older_than) else None

    folder = _folder(cache_dir)
    sweep(folder)
    _, _, freed, failed = _remove_where(folder, reason)
    typer.echo(f"{_size(freed)} freed in {folder}")
    if failed:
        raise typer.Exit(1)


def _remove_where(folder: Path, reason_of: Callable[[Path], str | None]) -> tuple[int, int, int, int]:
    """Remove the entries for which `reason_of` returns a reason or raises DamagedEntry, and print their names.

    Return four numbers: entries, removed entries, freed bytes, and entries that could not be read or removed.
    """
    from spurline_collation_fast.cache.entry import DamagedEntry
    from spurline_collation_fast.cache.folder import entry_paths, remove

    paths = entry_paths(folder)
    removed = freed = failed = 0
    for path in paths:
        size = _num_bytes(path)
        try:
            try:
                reason = reason_of(path)
            except DamagedEntry as damage:
                reason = f"damaged: {damage}"
            if reason is None:
                continue
            remove(path)
        except OSError as error:
            failed += 1
            typer.echo(f"{path}: cannot be read or removed: {error.strerror or error}", err=True)
            continue
        removed, freed = removed + 1, freed + size
        typer.echo(f"{path.name}  {_size(size)}  {reason}")
    return len(paths), removed, freed, failed


def _folder(cache_dir: Path | None) -> Path:
    from spurline_collation_fast.configs import default_cache_folder

    return cache_dir.expanduser() if cache_dir is not None else default_cache_folder()


def _num_bytes(entry: Path) -> int:
    return sum(file.stat().st_size for file in entry.glob("*"))


def _last_used(entry: Path) -> float:
    manifest = entry / "manifest.json"
    return (manifest if manifest.exists() else entry).stat().st_mtime


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
