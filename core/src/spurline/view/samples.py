"""The first rows of a run as they are trained, as `spurline data` shows them; of a run that generates, its prompts.

The run keeps nothing for it: when a reader asks, a process of its own reads the data once more, as that needs the
tokenizer and the plugins of the run, and torch. So it shows what the data are by then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spurline.errors import RunDirectoryError, SpurlineError
from spurline.report.record import CONFIG_FILE, read_mapping

if TYPE_CHECKING:
    from spurline.run.shown_data.sequences import ShownRow, ShownSequence

_ROWS = 4
_WAIT_S = 300.0


def read_samples(run_dir: Path) -> dict[str, Any]:
    """`facts` about the data, and `rows`, by a process of its own. Raises RunDirectoryError with what it says."""
    command = [sys.executable, "-m", __name__, str(run_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=_WAIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunDirectoryError(f"{run_dir}: its data were not read within {_WAIT_S:.0f} s.") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise RunDirectoryError(f"{run_dir}: the process that reads its data ended with {done.returncode}: {last}")
    # Libraries may have printed before.
    read = json.loads(done.stdout.splitlines()[-1])
    if "error" in read:
        raise RunDirectoryError(f"{run_dir}: its samples cannot be shown: {read['error']}")
    return read


def samples_of(run_dir: Path) -> dict[str, Any]:
    """The same in this process. Raises SpurlineError when the config cannot be read, or its data."""
    from spurline.config.loading import load_config
    from spurline.run.shown_data.sequences import ROW_LIMIT, show_data

    settings = read_mapping(run_dir / CONFIG_FILE)
    if not settings:
        raise RunDirectoryError(f"{run_dir} has no {CONFIG_FILE} yet.")
    loaded = load_config({**settings, "run_dir": str(run_dir)}, recorded=True)
    shown = show_data(loaded, _ROWS, ROW_LIMIT)
    return {"facts": shown.facts, "rows": [_row(row) for row in shown.rows]}


def _row(row: ShownRow) -> dict[str, Any]:
    return {"title": row.title, "length": row.length, "sequences": [_sequence(sequence) for sequence in row.sequences]}


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
    """What the process says: the samples, or an `error`."""
    try:
        return json.dumps(samples_of(run_dir))
    except SpurlineError as error:
        return json.dumps({"error": str(error)})


if __name__ == "__main__":
    print(answer(Path(sys.argv[1])))
