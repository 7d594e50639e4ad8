"""Save rows, models and tokenizers of a Python program in the run directory. Equal content is written once.

In: an object that a config has instead of a path. Out: a path. The name of a file contains a digest of its content, so
a run that is resumed with equal objects finds its files again. Each file is written under a temporary name and then
renamed, so no lock is needed. This module imports neither torch nor datasets, because objects save themselves.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import xxhash

from spurline.config.objects import KEPT, CannotKeepError, is_dataset
from spurline.files import remove, sync_file
from spurline_text.datasets.local_files import digest_of_file


class Keeper:
    """Saves the objects of one config in `run_dir`, which is an absolute path."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / KEPT

    def rows(self, value: Any) -> str:
        """Write a list of mappings or a `datasets.Dataset` into a JSON-lines file, and return its path.

        Raises CannotKeepError for any other value, and for a row that cannot be written as JSON.
        """
        rows = _rows_of(value)

        def write(path: Path) -> None:
            with path.open("xb") as file:
                for number, row in enumerate(rows):
                    file.write(_line(number, row))

        return self._kept("rows", ".jsonl", write)

    def saved(self, value: Any, what: str) -> str:
        """Save a model or tokenizer of transformers, and return its folder. `what` is `model` or `tokenizer`.

        Raises CannotKeepError for an object that cannot save itself completely.
        """
        if not callable(getattr(value, "save_pretrained", None)):
            text = f"is of type {type(value).__name__}, which is not a {what} of Hugging Face transformers"
            raise CannotKeepError(f"{text}. Give the result of `from_pretrained`, a folder or a hub name")
        if hasattr(value, "peft_config"):
            raise CannotKeepError(
                "has adapters of PEFT, which alone are not a model. Give `model.merge_and_unload()`, or the base model "
                "with backend.lora"
            )
        return self._kept(what, "", value.save_pretrained)

    def _kept(self, name: str, suffix: str, write: Callable[[Path], object]) -> str:
        """Write a file or folder under a temporary name, and rename it after the digest of its content."""
        # The temporary name is unique across threads and containers. After a kill, the next run in this directory
        # removes temporary files.
        temporary = self._folder / f".{name}.{uuid.uuid4().hex}.{os.getpid()}.tmp"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(temporary)
            path = self._folder / f"{name}-{_digest_of_synced(temporary)}{suffix}"
            if not path.exists():
                temporary.rename(path)
                sync_file(self._folder)
            return str(path)
        except CannotKeepError:
            raise
        except Exception as error:  # an object may raise any exception while it saves itself
            raise CannotKeepError(
                f"cannot be written into {self._folder}: {type(error).__name__}: {error}. Choose another run_dir, or "
                "save it by yourself and give the path"
            ) from error
        finally:
            remove(temporary)


def _rows_of(value: Any) -> Sequence[Any]:
    if is_dataset(value) and not hasattr(value, "__len__"):
        raise CannotKeepError(
            "is a stream, which has no length. Give some of its rows as a list, `list(dataset.take(10_000))`, or its "
            "path with name: hf_stream"
        )
    if isinstance(value, Mapping) or not (is_dataset(value) or isinstance(value, (list, tuple))):
        raise CannotKeepError(
            f"is of type {type(value).__name__}, which does not hold rows. Give a list of dicts or a datasets.Dataset, "
            "such as `frame.to_dict('records')` or the split `dataset['train']`"
        )
    if not len(value):
        raise CannotKeepError("is an empty list; give at least one row")
    return value


def _line(number: int, row: Any) -> bytes:
    if not isinstance(row, Mapping):
        raise CannotKeepError(f"row {number} is of type {type(row).__name__}. Each row is a dict of columns")
    try:
        return (_JSON.encode(dict(cast("Mapping[str, Any]", row))) + "\n").encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise CannotKeepError(
            f"row {number} cannot be written as JSON ({error}). Give texts, numbers, lists and mappings (None for "
            "NaN), or leave the column out"
        ) from None


def _as_json(value: Any) -> Any:
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    raise TypeError(f"a value is of type {type(value).__name__}")


_JSON = json.JSONEncoder(default=_as_json, allow_nan=False)


def _digest_of_synced(place: Path) -> str:
    """Force a file or folder to disk, and return the digest of its content."""
    digest = xxhash.xxh3_128()
    for path in [place] if place.is_file() else sorted(path for path in place.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(place)}\0{digest_of_file(path)}\0".encode())
        sync_file(path)
    sync_file(place)
    return digest.hexdigest()[:16]
