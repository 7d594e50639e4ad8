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


def read_facts(folder: Path, backend: str, layout: object) -> dict[str, Any]:
    """Read what `write_facts` wrote for this backend, whose facts have the `format` that `layout` says.

    Raises:
        CheckpointError: If another backend or version wrote the checkpoint, or it is damaged.
    """
    path = folder / _FACTS
    reason = "is missing"
    if path.exists():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise damaged(path, error) from error
        found = content.get("format") if isinstance(content, dict) else None
        if found == layout:
            return content
        reason = f"has format {found}, and {layout} is needed"
    raise CheckpointError(
        f"{path} {reason}: this is not a checkpoint of backend '{backend}' in this version. Resume with the backend "
        "and version that wrote it. Or export it with `spurline export` and its config, and set model.path to the "
        "result."
    )


def damaged(path: Path, error: Exception) -> DamagedCheckpointError:
    """Return the error for a file of a checkpoint that cannot be read."""
    return DamagedCheckpointError(f"{path}: missing or damaged ({error}). Resume from another checkpoint.")


def check_weights(where: Path, saved: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    """Raise CheckpointError unless the checkpoint has the weights that the run trains, with equal descriptions.

    Both mappings have the result of `describe` by name.
    """
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
    """Raise CheckpointError unless the digest of the frozen weights is the saved one."""
    if saved != frozen:
        raise CheckpointError(
            f"{where}: the run of this checkpoint had other frozen weights than this run. Resume with the "
            "model.path, model.revision, model.init, backend.lora.base_dtype, backend.weights and seed the checkpoint "
            "was made with."
        )


def _some(label: str, names: list[str]) -> str:
    return f"{len(names)} {label} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). " if names else ""
