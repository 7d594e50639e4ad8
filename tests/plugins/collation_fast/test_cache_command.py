"""`spurline cache`: what people see of the cache, and how they clean it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cache_entries import make_chunks, make_key, write

from spurline.cli import main
from spurline_collation_fast.cache import folder
from spurline_collation_fast.cache.entry import Manifest
from spurline_collation_fast.cache.folder import TokenCache
from spurline_collation_fast.cache_command import _num_bytes, _size

KEYS = [make_key("one", ("first", "with a [bold] name")), make_key("two")]


@pytest.fixture
def cache_folder(tmp_path: Path) -> Path:
    """A cache of two entries."""
    for key in KEYS:
        write(TokenCache(tmp_path), key, make_chunks())
    return tmp_path


def cache(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a subcommand."""
    with pytest.raises(SystemExit) as stopped:
        main(["cache", *words, "--cache-dir", str(folder)])
    captured = capsys.readouterr()
    assert isinstance(stopped.value.code, int)
    return stopped.value.code, captured.out + captured.err


def damage(folder: Path, index: int = 0) -> Path:
    path = folder / KEYS[index].digest / "tokens.bin"
    content = bytearray(path.read_bytes())
    content[70_000] ^= 1
    path.write_bytes(content)
    return path


def age(folder: Path, index: int, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(folder / KEYS[index].digest / "manifest.json", (then, then))


@pytest.mark.processes
def test_the_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom spurline.cli import main\n"
        "try: main(['cache', 'prune', '--help'])\nexcept SystemExit: pass\n"
        "print('HEAVY', [name for name in ('numpy', 'torch', 'transformers', 'rich.table') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "--older-than" in result.stdout
    assert result.stdout.rstrip().endswith("HEAVY []"), result.stdout


def test_list_shows_each_entry_with_its_datasets(
    capsys: pytest.CaptureFixture[str], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    os.truncate(cache_folder / KEYS[1].digest / "manifest.json", 5)
    code, output = cache(capsys, cache_folder, "list")
    assert code == 0
    lines = {line.split()[0]: line for line in output.splitlines()}
    assert "first, with a [bold] name" in lines[KEYS[0].digest[:12]]
    assert "480" in lines[KEYS[0].digest[:12]]
    assert "damaged" in lines[KEYS[1].digest[:12]]
    assert output.splitlines()[-1].startswith("2 entries")
    assert output.splitlines()[-1].endswith(f"in {cache_folder}")


@pytest.mark.parametrize("command", ["list", "verify", "prune"])
def test_a_cache_that_does_not_exist_is_empty(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    code, output = cache(capsys, tmp_path / "missing", command)
    assert code == 0
    assert "0 " in output
    assert not (tmp_path / "missing").exists()


def test_verify_names_the_damaged_file_and_removes_the_entry(
    capsys: pytest.CaptureFixture[str], cache_folder: Path
) -> None:
    assert cache(capsys, cache_folder, "verify") == (0, "2 entries read, 2 whole\n")
    path = damage(cache_folder)
    code, output = cache(capsys, cache_folder, "verify")
    assert code == 1
    assert str(path) in output
    assert "2 entries read, 1 whole" in output
    assert TokenCache(cache_folder).open(KEYS[0]) is None
    assert cache(capsys, cache_folder, "verify")[0] == 0


def test_prune_removes_damaged_entries_and_leftovers_and_nothing_else(
    capsys: pytest.CaptureFixture[str], cache_folder: Path
) -> None:
    path = cache_folder / KEYS[0].digest / "manifest.json"
    os.truncate(path, 5)
    for name in (".removed-x-1", ".writing-dead"):
        (cache_folder / name).mkdir()
    with TokenCache(cache_folder).writer(make_key("three")) as writer:
        (cache_folder / ".removed-x-1").mkdir()
        code, output = cache(capsys, cache_folder, "prune")
        assert code == 0
        assert str(path) in output
        assert sorted(cache_folder.iterdir()) == sorted([writer.folder, cache_folder / KEYS[1].digest])


def test_prune_removes_entries_that_no_run_has_opened_for_long(
    capsys: pytest.CaptureFixture[str], cache_folder: Path
) -> None:
    for index in (0, 1):
        age(cache_folder, index, 40)
    TokenCache(cache_folder).open(KEYS[0])
    code, output = cache(capsys, cache_folder, "prune", "--older-than", "30")
    assert code == 0
    assert "unused for 40 days" in output
    assert [path.name for path in cache_folder.iterdir()] == [KEYS[0].digest]


def test_prune_all_empties_the_cache_under_a_reader(capsys: pytest.CaptureFixture[str], cache_folder: Path) -> None:
    opened = TokenCache(cache_folder).open(KEYS[0])
    assert opened is not None
    assert cache(capsys, cache_folder, "prune", "--all")[0] == 0
    assert list(cache_folder.iterdir()) == []
    assert opened.store.lengths().sum() == len(opened.store.tokens)


@pytest.mark.parametrize("words", [["list"], ["verify"], ["prune"]], ids=" ".join)
def test_an_entry_that_cannot_be_read_is_named_and_kept(
    capsys: pytest.CaptureFixture[str], cache_folder: Path, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    real = Manifest.read

    def read(folder: Path) -> object:
        if folder.name == KEYS[0].digest:
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(Manifest, "read", read)
    code, output = cache(capsys, cache_folder, *words)
    assert code == (words != ["list"])
    assert "Permission denied" in output
    assert len(list(cache_folder.iterdir())) == 2


def test_a_folder_that_cannot_be_listed_is_an_error_with_a_fix(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for words in ("list", "verify", "prune"):
        code, output = cache(capsys, tmp_path / "file", words)
        assert code == 2
        assert "the token cache cannot be listed: Not a directory" in output
        assert "--cache-dir" in output


def test_entries_that_a_run_adds_meanwhile_do_not_change_the_counts(
    capsys: pytest.CaptureFixture[str], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, added = folder.entry_paths, iter(["three", "four"])

    def paths(root: Path) -> list[Path]:
        found = real(root)
        write(TokenCache(root), make_key(next(added)), make_chunks())
        return found

    monkeypatch.setattr(folder, "entry_paths", paths)
    assert cache(capsys, cache_folder, "verify") == (0, "2 entries read, 2 whole\n")
    num_bytes = sum(map(_num_bytes, real(cache_folder)))
    code, output = cache(capsys, cache_folder, "prune", "--all")
    *removed, last = output.splitlines()
    assert (code, len(removed)) == (0, 3)
    assert last == f"{_size(num_bytes)} freed in {cache_folder}"
