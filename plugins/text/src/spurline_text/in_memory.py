"""Write rows, models and tokenizers of a Python program below the run directory, once for each content.

In: an object in the place of a path. Out: the path. A file with the same content is not written again, so that a run
that is resumed with equal objects finds the files that it began with. Everything is written under a temporary name, to
disk, and renamed, so no lock is needed. Imports neither torch nor datasets: objects save themselves.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import xxhash

from spurline.config.objects import KEPT, CannotKeepError, is_dataset
from spurline.files import sync_file
from spurline_text.datasets.local_files import digest_of_file


class Keeper:
    """Keeps the objects of one config below `run_dir`, which is absolute."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / KEPT

    def rows(self, value: Any) -> str:
        """Return the path of a JSON-lines file with these rows: a list of mappings, or a `datasets.Dataset`.

        Raises CannotKeepError for any other value, and for a row that JSON cannot hold.
        """
        rows = _rows_of(value)
        temporary = self._temporary("rows.jsonl")
        try:
            with temporary.open("xb") as file:
                for number, row in enumerate(rows):
                    file.write(_line(number, row))
                file.flush()
                os.fsync(file.fileno())
            return str(self._placed(temporary, f"rows-{digest_of_file(temporary)[:16]}.jsonl"))
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            temporary.unlink(missing_ok=True)

    def saved(self, value: Any, what: str) -> str:
        """Return the folder in which a `model` or `tokenizer` of transformers saved itself.

        Raises CannotKeepError for an object that cannot save itself as a whole.
        """
        if not callable(getattr(value, "save_pretrained", None)):
            text = f"is of type {type(value).__name__}, which is not a {what} of Hugging Face transformers"
            raise CannotKeepError(f"{text}. Give one that `from_pretrained` returned, a folder or a hub name")
        if hasattr(value, "peft_config"):
            raise CannotKeepError(
                "has adapters of PEFT, which alone are not a model. Give `model.merge_and_unload()`, or the base model "
                "with backend.lora"
            )
        temporary = self._temporary(what)
        try:
            value.save_pretrained(temporary)
            return str(self._placed(temporary, f"{what}-{_digest_of_synced(temporary)}"))
        except Exception as error:  # its class may raise anything on the way
            text = f"cannot be saved into {self._folder}: {type(error).__name__}: {error}"
            raise CannotKeepError(f"{text}. Save it by yourself, and give the folder") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _temporary(self, name: str) -> Path:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from error
        # Opening the run directory clears such a name away after a kill. It differs for each thread and container.
        return self._folder / f".{name}.{uuid.uuid4().hex}.{os.getpid()}.tmp"

    def _placed(self, temporary: Path, name: str) -> Path:
        path = self._folder / name
        if not path.exists():
            try:
                temporary.rename(path)
            except OSError:
                # Another program may have put the same there meanwhile.
                if not path.exists():
                    raise
            sync_file(self._folder)
        return path

    def _unwritable(self, error: OSError) -> CannotKeepError:
        return CannotKeepError(f"cannot be written into {self._folder}: {error}. Choose another run_dir")


def _rows_of(value: Any) -> Iterable[Any]:
    if is_dataset(value):
        if not hasattr(value, "__len__"):
            raise CannotKeepError(
                "is a stream, which has no length. Give some of its rows as a list, `list(dataset.take(10_000))`, or "
                "its path with name: hf_stream"
            )
        return cast("Iterable[Any]", value)
    if isinstance(value, Mapping):
        names = ", ".join(map(str, cast("Mapping[Any, Any]", value)))
        raise CannotKeepError(f"is a mapping of {names}. Give a list of rows, or one split: `dataset['train']`")
    if not isinstance(value, (list, tuple)):
        records = ", `frame.to_dict('records')`" if hasattr(value, "to_dict") else ""
        text = f"is of type {type(value).__name__}, which does not hold rows"
        raise CannotKeepError(f"{text}. Give a list of dicts{records}, or a datasets.Dataset")
    if not value:
        raise CannotKeepError("is an empty list; give at least one row")
    return cast("Iterable[Any]", value)


def _line(number: int, row: Any) -> bytes:
    if not isinstance(row, Mapping):
        raise CannotKeepError(f"row {number} is of type {type(row).__name__}. Each row is a dict of columns")
    values = cast("Mapping[Any, Any]", row)
    try:
        return (_JSON.encode(dict(values)) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        column = next((column for column, value in values.items() if not _is_json(value)), "?")
        raise CannotKeepError(
            f"row {number}, column {column!r}: cannot be written as JSON ({error}). Give texts, numbers, lists and "
            "mappings (None for NaN), or leave the column out"
        ) from None


def _is_json(value: Any) -> bool:
    try:
        _JSON.encode(value).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _as_json(value: Any) -> Any:
    """Turn arrays and numbers of numpy and torch into lists and numbers."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


_JSON = json.JSONEncoder(default=_as_json, allow_nan=False)


def _digest_of_synced(folder: Path) -> str:
    """Force a folder to disk, since its name will say that it is complete, and return the digest of its content."""
    digest = xxhash.xxh3_128()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{digest_of_file(path)}\0".encode())
        sync_file(path)
    sync_file(folder)
    return digest.hexdigest()[:16]
