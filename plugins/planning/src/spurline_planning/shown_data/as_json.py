"""What `spurline view` shows of `spurline data`: the first rows of a run, or its prompts, as one line of JSON.

`python -m spurline_planning.shown_data.as_json RUN_DIR` prints it, after whatever libraries print.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spurline.config.loading import load_config
from spurline.errors import RunDirectoryError, SpurlineError
from spurline.run.record_files import CONFIG_FILE, read_mapping
from spurline_planning.shown_data.sequences import ROW_LIMIT, ShownRow, ShownSequence, show_data

_ROWS = 4


def samples_of(run_dir: Path) -> dict[str, Any]:
    """`facts` about the data, and `rows`. Raises SpurlineError when the config cannot be read, or its data."""
    settings = read_mapping(run_dir / CONFIG_FILE)
    if not settings:
        raise RunDirectoryError(f"{run_dir} has no {CONFIG_FILE} yet.")
    loaded = load_config({**settings, "run_dir": str(run_dir)}, recorded=True)
    shown = show_data(loaded, _ROWS, ROW_LIMIT)
    return {"facts": shown.facts, "rows": [_row(row) for row in shown.rows]}


def _row(row: ShownRow) -> dict[str, Any]:
    return {"title": row.heading, "sequences": [_sequence(sequence) for sequence in row.sequences]}


def _sequence(sequence: ShownSequence) -> dict[str, Any]:
    """Lists have an entry per token."""
    return {
        "uid": sequence.uid,
        "kind": sequence.kind,
        "parts": [[part.role, part.tokens, part.trained] for part in sequence.parts],
        "notes": sequence.notes,
        "pieces": [token.text for token in sequence.tokens],
        "ids": [token.token_id for token in sequence.tokens],
        "weights": [token.weight for token in sequence.tokens],
        "special": [token.is_special for token in sequence.tokens],
    }


def answer(run_dir: Path) -> str:
    """The line: the samples, or an `error`."""
    try:
        return json.dumps(samples_of(run_dir))
    except SpurlineError as error:
        return json.dumps({"error": str(error)})


if __name__ == "__main__":
    print(answer(Path(sys.argv[1])))
