"""Write rows, models and tokenizers of a Python program below the run directory, once for each content.

In: an object in the place of a path. Out: the path. What is there already is not written again, so that a run that is
resumed with equal objects finds what it began with. Everything is written beside its place, to disk, and renamed, so
that no lock is needed: programs with one run_dir keep apart what differs, and share what is equal. Imports neither
torch nor datasets: objects save themselves.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import xxhash

from spurline.config.objects import KEPT, CannotKeepError, is_dataset
from spurline.files import sync_file

_CHUNK_BYTES = 1 << 22


class Keeper:
    """Keeps the objects of one config. run_dir: absolute; its folder is made when there is something to keep."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / KEPT

    def rows(self, value: Any) -> str:
        """The path of a JSON-lines file with these rows: a list of mappings, or a `datasets.Dataset`.

        Raises CannotKeepError for what is neither, and for a value that JSON cannot hold.
        """
        digest = xxhash.xxh3_128()
        temporary = self._temporary("rows.jsonl")
        try:
            with temporary.open("xb") as file:
                for line in _lines_of(value):
                    digest.update(line)
                    file.write(line)
                file.flush()
                os.fsync(file.fileno())
            return str(self._placed(temporary, self._folder / f"rows-{digest.hexdigest()[:16]}.jsonl"))
        except OSError as error:
            raise CannotKeepError(f"cannot be written into {self._folder}: {error}. Choose another run_dir") from error
        finally:
            temporary.unlink(missing_ok=True)

    def saved(self, value: Any, what: str) -> str:
        """The folder in which a model or tokenizer of transformers saved itself.

        what: `model` or `tokenizer`. Raises CannotKeepError for what cannot do so, or not as a whole.
        """
        _check_saves_itself(value, what)
        temporary = self._temporary(what)
        try:
            value.save_pretrained(temporary)
            return str(self._placed(temporary, self._folder / f"{what}-{_digest_of_synced(temporary)}"))
        # Whatever its class does on the way.
        except Exception as error:
            text = f"cannot be saved into {self._folder}: {type(error).__name__}: {error}"
            raise CannotKeepError(f"{text}. Save it by yourself, and give the folder") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _temporary(self, name: str) -> Path:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotKeepError(f"cannot be written into {self._folder}: {error}. Choose another run_dir") from error
        # A name that opening the run directory clears away after a kill, and that is another one for each thread, and
        # for each container with processes of the same number.
        return self._folder / f".{name}.{uuid.uuid4().hex}.{os.getpid()}.tmp"

    def _placed(self, temporary: Path, path: Path) -> Path:
        if not path.exists():
            try:
                temporary.rename(path)
            except OSError:
                # Another program has put the same there meanwhile.
                if not path.exists():
                    raise
            sync_file(self._folder)
        return path


def _check_saves_itself(value: Any, what: str) -> None:
    if not callable(getattr(value, "save_pretrained", None)):
        text = f"is of type {type(value).__name__}, which is no {what} of Hugging Face transformers"
        raise CannotKeepError(f"{text}. Give one that `from_pretrained` returned, a folder or a hub name")
    if hasattr(value, "peft_config"):
        raise CannotKeepError(
            "has adapters of PEFT, which are no model of their own. Give `model.merge_and_unload()`, or the base "
            "model with backend.lora"
        )


def _lines_of(value: Any) -> Iterator[bytes]:
    """One of JSON for each row. Raises CannotKeepError."""
    return (_line(number, row) for number, row in enumerate(_rows_of(value)))


def _rows_of(value: Any) -> Iterable[Any]:
    if is_dataset(value):
        if not hasattr(value, "__len__"):
            raise CannotKeepError(
                "is a dataset that is read as it is needed, and has no length. Give so many of its rows as a list, "
                "`list(dataset.take(10_000))`, or its path with name: hf_stream"
            )
        return cast("Iterable[Any]", value)
    if isinstance(value, Mapping):
        names = ", ".join(map(str, cast("Mapping[Any, Any]", value)))
        raise CannotKeepError(f"is a mapping of {names}. Give a list of rows, or one split: `dataset['train']`")
    if isinstance(value, (list, tuple)):
        if not value:
            raise CannotKeepError("is an empty list; give at least one row")
        return cast("Sequence[Any]", value)
    records = ", `frame.to_dict('records')`" if hasattr(value, "to_dict") else ""
    text = f"is of type {type(value).__name__}, which holds no rows that Spurline can read"
    raise CannotKeepError(f"{text}. Give a list of dicts{records}, or a datasets.Dataset")


def _line(number: int, row: Any) -> bytes:
    if not isinstance(row, Mapping):
        raise CannotKeepError(f"row {number} is of type {type(row).__name__}. Each row is a dict of columns")
    values = cast("Mapping[Any, Any]", row)
    try:
        return (_JSON.encode(dict(values)) + "\n").encode()
    except (TypeError, ValueError, RecursionError):
        pass
    for column, value in values.items():
        try:
            _JSON.encode({column: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise CannotKeepError(
                f"row {number}, column {column!r}: cannot be written as JSON ({error}). Give texts, numbers, lists and "
                f"mappings{', and None for NaN' if _is_nan(value) else ''}, or leave the column out"
            ) from None
    raise AssertionError(f"row {number} is no JSON, but each of its columns is")


def _as_json(value: Any) -> Any:
    """Arrays and numbers of numpy and torch as lists and numbers."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


_JSON = json.JSONEncoder(default=_as_json, allow_nan=False)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _digest_of_synced(folder: Path) -> str:
    """Force a folder to disk and return the digest of its names and contents.

    A folder that has its digest as its name counts as complete, so it must be on disk before it is renamed.
    """
    digest = xxhash.xxh3_128()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
        sync_file(path)
    sync_file(folder)
    return digest.hexdigest()[:16]
