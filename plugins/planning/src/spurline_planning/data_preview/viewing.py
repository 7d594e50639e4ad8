"""Show the first rows of a run in `spurline view`, as `spurline data` shows them.

The run keeps nothing for it. When a reader asks, a process of its own (`python -m MODULE RUN_DIR`) reads the data once
more and prints rows as one line of JSON, as that needs the tokenizer, the plugins of the run, and torch. So it shows
what the data are by then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from spurline.config.loading import load_config
from spurline.errors import RunDirectoryError, SpurlineError
from spurline.run.record_files import CONFIG_FILE, read_mapping

_ROWS = 4
_WAIT_S = 300.0
_NUMBER = TypeAdapter(int)


def answers(run_dirs: Sequence[Path]) -> Mapping[str, Callable[[Mapping[str, str]], Any]]:
    """Return what answers the page of `spurline view` when it asks for the samples of a run, by its number."""

    def samples(query: Mapping[str, str]) -> Any:
        run = _NUMBER.validate_python(query.get("run"))
        if not 0 <= run < len(run_dirs):
            raise LookupError(f"There is no run {run}.")
        return read_samples(run_dirs[run])

    return {"samples": samples}


def read_samples(run_dir: Path) -> dict[str, Any]:
    """Return `facts` about the data, and `rows`, by a process of its own. Raises RunDirectoryError if that fails."""
    command = [sys.executable, "-m", "spurline_planning.data_preview.viewing", str(run_dir)]
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
    """Read `facts` about the data, and `rows`, in this process; an `error` if config or data cannot be read."""
    # Here, as the server of the page needs none of it.
    from spurline_planning.data_preview.rows import ROW_LIMIT, ShownSequence, show_data

    def values(sequence: ShownSequence) -> dict[str, Any]:
        return {
            "uid": sequence.uid,
            "kind": sequence.kind,
            "notes": sequence.notes,
            "pieces": [token.text for token in sequence.tokens],
            "ids": [token.token_id for token in sequence.tokens],
            "weights": [token.weight for token in sequence.tokens],
            "special": [token.is_special for token in sequence.tokens],
        }

    try:
        settings = read_mapping(run_dir / CONFIG_FILE)
        if not settings:
            raise RunDirectoryError(f"{run_dir} has no {CONFIG_FILE} yet.")
        loaded = load_config({**settings, "run_dir": str(run_dir)}, recorded=True)
        shown = show_data(loaded, _ROWS, ROW_LIMIT)
    except SpurlineError as error:
        return {"error": str(error)}
    rows = [{"title": row.heading, "sequences": [values(sequence) for sequence in row.sequences]} for row in shown.rows]
    return {"facts": shown.facts, "rows": rows}


if __name__ == "__main__":
    print(json.dumps(samples_of(Path(sys.argv[1]))))
