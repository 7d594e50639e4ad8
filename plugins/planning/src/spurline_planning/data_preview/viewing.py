"""Show the first rows of a run in `spurline view`, as `spurline data` shows them.

On request, a child process (`python -m MODULE RUN_DIR`) reads the run's data and prints the rows as one line of JSON.
This keeps tokenizer, plugins and torch out of the server. If the data has changed since the run, the page shows the
changed data.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from spurline.config.loading import load_config
from spurline.errors import RunDirectoryError, SpurlineError
from spurline.run.directory import CONFIG_FILE, read_mapping

_ROWS = 4
_WAIT_S = 300.0
_NUMBER = TypeAdapter(int)


def answers(run_dirs: Sequence[Path]) -> Mapping[str, Callable[[Mapping[str, str]], Any]]:
    """Return the function that answers requests named `samples`. The query's `run` is an index of `run_dirs`."""

    def samples(query: Mapping[str, str]) -> Any:
        run = _NUMBER.validate_python(query.get("run"))
        if not 0 <= run < len(run_dirs):
            raise LookupError(f"Run {run} does not exist.")
        return read_samples(run_dirs[run])

    return {"samples": samples}


def read_samples(run_dir: Path) -> dict[str, Any]:
    """Read `facts` about the data, and the `rows` to show, in a child process. Raises RunDirectoryError on failure."""
    command = [sys.executable, "-m", "spurline_planning.data_preview.viewing", str(run_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=_WAIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RunDirectoryError(f"{run_dir}: its data was not read within {_WAIT_S:.0f} s.") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunDirectoryError(f"{run_dir}: the process that reads its data ended with {done.returncode}: {last}")
    # Libraries may have printed lines before the JSON.
    read = json.loads(done.stdout.splitlines()[-1])
    if "error" in read:
        raise RunDirectoryError(f"{run_dir}: its samples cannot be shown: {read['error']}")
    return read


def samples_of(run_dir: Path) -> dict[str, Any]:
    """Read `facts` about the data, and the `rows` to show, in this process. If that fails, return an `error`."""
    # The server of the page does not need this import.
    from spurline_planning.data_preview.rows import ROW_LIMIT, show_data

    try:
        settings = read_mapping(run_dir / CONFIG_FILE)
        if not settings:
            raise RunDirectoryError(f"{run_dir} has no {CONFIG_FILE} yet.")
        loaded = load_config({**settings, "run_dir": str(run_dir)}, recorded=True)
        return asdict(show_data(loaded, _ROWS, ROW_LIMIT))
    except SpurlineError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    print(json.dumps(samples_of(Path(sys.argv[1]))))
