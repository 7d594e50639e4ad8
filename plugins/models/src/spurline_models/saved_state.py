"""Check that this backend wrote a checkpoint, and that it fits the run, before anything is loaded.

A backend writes facts about a model, such as its update count, into `state.json` beside the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spurline.digests import FileDigest, HashedFile
from spurline.errors import CheckpointError, DamagedCheckpointError

_FACTS = "state.json"


def write_facts(folder: Path, facts: Mapping[str, Any]) -> dict[str, FileDigest]:
    """Write JSON values to the disk, and return the file's digest by its name. Raises OSError."""
    with HashedFile(folder / _FACTS) as file:
        file.write(json.dumps(facts).encode())
    return {_FACTS: file.digest}


def read_facts(folder: Path, backend: str, layout: object, *, is_ours: bool = False) -> dict[str, Any]:
    """Read what `write_facts` wrote.

    Args:
        folder: The backend's part of a checkpoint.
        backend: The name of the backend that reads.
        layout: The `format` of the backend's facts; a text begins with the name of the backend and a dash.
        is_ours: Whether this backend is known to have written the checkpoint.

    Raises:
        CheckpointError: If another backend or version wrote the checkpoint, or it is damaged.
    """
    path = folder / _FACTS
    if not path.exists() and not is_ours:
        raise _of_another_backend(folder, backend, f"it has no {_FACTS}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(
            f"{path}: missing or damaged ({error}). Resume from another checkpoint."
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    writer = found.rpartition("-")[0] if isinstance(found, str) else backend
    if writer != backend:
        raise _of_another_backend(folder, backend, f"'{writer}' wrote it")
    if found != layout:
        raise CheckpointError(
            f"{path}: another version of Spurline wrote this state of backend '{backend}' (format {found}, and this "
            f"version reads {layout}). Use that version."
        )
    return content


def _of_another_backend(folder: Path, backend: str, why: str) -> CheckpointError:
    return CheckpointError(
        f"{folder}: this is not a checkpoint of backend '{backend}': {why}. Resume with the backend that wrote it; or "
        "export it with `spurline export` and its config, and set model.path to the result."
    )


def check_weights(where: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the checkpoint has the weights that the run trains, with the same descriptions."""
    missing, foreign = sorted(wanted.keys() - saved.keys()), sorted(saved.keys() - wanted.keys())
    if missing or foreign:
        raise CheckpointError(
            f"{where}: the checkpoint holds other weights than this run trains: {_some('missing', missing)}"
            f"{_some('not in the model', foreign)}Resume with the model and backend.lora the checkpoint was made with."
        )
    for name, description in wanted.items():
        if saved[name] != description:
            raise CheckpointError(
                f"{where}: {name} is {saved[name]} in the checkpoint, but {description} in this run. Resume with the "
                "model, backend.lora and backend.precision the checkpoint was made with."
            )


def check_frozen(where: Path, saved: str, frozen: str) -> None:
    """Raise CheckpointError unless frozen weights have the digest that was saved."""
    if saved != frozen:
        raise CheckpointError(
            f"{where}: the run of this checkpoint had other frozen weights than this run's model has. Resume with the "
            "model.path, model.revision, model.init, backend.lora.base_dtype, backend.weights and seed the checkpoint "
            "was made with."
        )


def _some(label: str, names: list[str]) -> str:
    return f"{len(names)} {label} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). " if names else ""
