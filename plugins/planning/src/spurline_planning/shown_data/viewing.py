"""The first rows of a run as they are trained, as `spurline data` shows them; of a run that generates, its prompts.

The run keeps nothing for it: when a reader asks, a process of its own reads the data once more, as that needs the
tokenizer and the plugins of the run, and torch. So it shows what the data are by then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from spurline.errors import RunDirectoryError

_PROGRAM = "spurline_planning.shown_data.as_json"
_WAIT_S = 300.0


def read_samples(run_dir: Path) -> dict[str, Any]:
    """`facts` about the data, and `rows`, by a process of its own. Raises RunDirectoryError with what it says."""
    command = [sys.executable, "-m", _PROGRAM, str(run_dir)]
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


def answers(run_dirs: Sequence[Path]) -> Mapping[str, Callable[[Mapping[str, str]], Any]]:
    """Return what answers the page of `spurline view` when it asks for the samples of a run, by its number."""

    def samples(query: Mapping[str, str]) -> Any:
        run = _NUMBER.validate_python(query.get("run"))
        if not 0 <= run < len(run_dirs):
            raise LookupError(f"There is no run {run}.")
        return read_samples(run_dirs[run])

    return {"samples": samples}


_NUMBER = TypeAdapter(int)
