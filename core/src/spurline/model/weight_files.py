"""Look at the weight files of a model folder before they are loaded: are they there, and are they whole?

Reads headers and file lists alone, so that `spurline plan` can afford it for any size.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from spurline.config.run_config import ModelConfig
from spurline.errors import ModelError

_CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""In the order in which transformers looks for them."""

_LFS = b"version https://git-lfs"
_PICKLE = b"\x80"
_FETCH = "Copy or download it again."


def check_weight_files(model: ModelConfig) -> None:
    """Raise ModelError naming a file that is missing or broken. Models on the hub are checked by its client."""
    folder = Path(model.path)
    if model.init == "random" or not folder.is_dir():
        return
    found = next((folder / name for name in _CANDIDATES if (folder / name).is_file()), None)
    if found is None:
        files = ", ".join(sorted(entry.name for entry in folder.iterdir())[:12]) or "(empty)"
        raise ModelError(
            f"model.path: no weights can be loaded from folder {folder}: it has none of {', '.join(_CANDIDATES)}.\n"
            f"Files there: {files}.\nTo train this architecture from scratch set model.init: random."
        )
    for path in shards_of(found) if found.suffix == ".json" else [found]:
        problem = _problem_of(path)
        if problem:
            raise ModelError(f"model.path: {path} {problem} {_FETCH}")


def shards_of(index: Path) -> list[Path]:
    """The files that an index names."""
    try:
        content: Any = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in content["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"model.path: {index} is no index of weights ({type(error).__name__}: {error}). {_FETCH}"
        ) from error
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ModelError(
            f"model.path: {index} names {len(names)} files, of which {', '.join(missing[:3])}{more} "
            f"{'is' if len(missing) == 1 else 'are'} not in {index.parent}. Copy or download the rest."
        )
    return [index.parent / name for name in names]


def _problem_of(path: Path) -> str:
    """What is wrong with a file of weights, as the end of a sentence that begins with its name; empty for nothing."""
    size = path.stat().st_size
    if size == 0:
        return "is empty."
    with path.open("rb") as file:
        begin = file.read(len(_LFS))
    if begin == _LFS:
        return "is a pointer of Git LFS and not the weights: run `git lfs pull` in that folder."
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as _:
                return ""
        except (SafetensorError, OSError) as error:
            return f"is truncated or no safetensors file ({error}; {size:,} bytes)."
    if zipfile.is_zipfile(path) or (begin[:1] == _PICKLE and not begin.startswith(b"PK")):
        return ""
    return f"is truncated or was not written by torch.save ({size:,} bytes)."
