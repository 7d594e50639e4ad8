"""Write and read RUN_DIR/metrics.jsonl: one JSON object per finished step, forced to disk before each checkpoint.

If the process is killed, at most the last line is incomplete. Readers skip it, and the next start removes it.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from io import FileIO
from numbers import Integral
from pathlib import Path
from typing import Any

from spurline.errors import RunDirectoryError, RunFailedError
from spurline.files import own_file, regular_file, replace_file, write_errors
from spurline.protocols.tracker import RunInfo
from spurline.trackers.configs import JsonlTrackerConfig

METRICS_FILE = "metrics.jsonl"
"""Name of the file inside the run directory."""

_LEADING_KEYS = ("epoch", "loss", "grad_norm", "lr")


class JsonlTracker:
    """Appends each step's metrics to `metrics.jsonl`."""

    def __init__(self, config: JsonlTrackerConfig) -> None:
        self._file: FileIO | None = None

    def start(self, info: RunInfo) -> None:
        """Open the file. If it exists, keep only the lines of steps before `info.first_step`.

        Raises RunDirectoryError if one of these lines is not a recorded step. An incomplete last line is no error.
        """
        assert self._file is None, f"{info.run_dir / METRICS_FILE} is already open"
        path = info.run_dir / METRICS_FILE
        cut_back(path, info.first_step - 1)
        # Find an unreadable line now, not when the report is drawn at the end of the run.
        read_metrics(path)
        with write_errors(path):
            self._file = open(path, "ab", buffering=0, opener=own_file)  # noqa: SIM115 - closed by `close`

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, which survives a crash of this process. Raises RunFailedError if the disk is full."""
        assert self._file is not None, "JsonlTracker.log before start or after close"
        line = encode_line(step, metrics)
        with write_errors(Path(self._file.name)):
            # There is one write call, so that a kill leaves at most this line incomplete.
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def flush(self) -> None:
        """Force all lines to the disk, so that they survive a power cut. Raises RunFailedError if that fails."""
        assert self._file is not None, "JsonlTracker.flush before start or after close"
        with write_errors(Path(self._file.name)):
            os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def encode_line(step: int, metrics: Mapping[str, float]) -> bytes:
    """Return one line with its newline: `step`, then the common metrics, then all others sorted by name.

    Raises RunFailedError naming a metric that is not finite.
    """
    leading = [key for key in _LEADING_KEYS if key in metrics]
    others = sorted(key for key in metrics if key not in _LEADING_KEYS and key != "step")
    values = {"step": int(step)} | {key: _plain_number(step, key, metrics[key]) for key in (*leading, *others)}
    # Half a surrogate pair in a name cannot be encoded, so it is written as the JSON escape `\uXXXX`.
    return (json.dumps(values, ensure_ascii=False, allow_nan=False) + "\n").encode(errors="backslashreplace")


def _plain_number(step: int, key: str, value: Any) -> int | float:
    if isinstance(value, Integral):
        return int(value)
    number = float(value)
    if not math.isfinite(number):
        raise RunFailedError(
            f"Metric '{key}' of step {step} is {number}, but metrics must be finite. Look at the loss, reward or "
            "plugin that computes it."
        )
    return number


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return all objects of a JSON-lines file, without an incomplete last line. A missing file has no objects.

    Raises RunDirectoryError if any other line is unreadable. The error names the file and the line.
    """
    found: list[dict[str, Any]] = []
    for number, _, line in _lines(path):
        if isinstance(line, ValueError):
            raise _foreign(path, number, str(line)) from line
        found.append(line)
    return found


def read_metrics(path: Path, *, skip_foreign: bool = False) -> list[dict[str, Any]]:
    """Return the recorded steps of a metrics file. In each, all values are numbers, and `step` is an integer.

    Args:
        path: The file. If it is missing, there are no steps.
        skip_foreign: Whether to leave out lines that are not recorded steps, with one warning on standard error.

    Raises:
        RunDirectoryError: If a line is not a recorded step and `skip_foreign` is false. The error names the line.
    """
    steps: list[dict[str, Any]] = []
    first = ""
    for number, _, line in _lines(path):
        if (wrong := _not_metrics(line)) is None:
            assert isinstance(line, dict)
            steps.append(line)
        elif not skip_foreign:
            raise _foreign(path, number, wrong)
        else:
            first = first or f"{path}:{number}: {wrong}. Such lines are left out."
    if first:
        print(first, file=sys.stderr, flush=True)
    return steps


def _not_metrics(line: Mapping[str, Any] | ValueError) -> str | None:
    """Return why a line is not the metrics of a step, or None if it is."""
    if isinstance(line, ValueError):
        return str(line)
    if type(line.get("step")) is not int:
        return "no whole number under 'step'"
    if {*map(type, line.values())} <= {int, float, bool}:
        return None
    odd = next(name for name, value in line.items() if not isinstance(value, int | float))
    return f"no number under '{odd[:100]}'"


def cut_back(path: Path, last_step: int) -> None:
    """Keep the lines of steps up to `last_step`, byte for byte, and drop the rest. If the file is missing, create it.

    A kill meanwhile leaves the file either unchanged or cut back. Lines beyond `last_step` may be garbage after an
    earlier power cut, since they were not forced to disk. Raises RunDirectoryError if an earlier line is unreadable.
    """
    kept: list[bytes] = []
    reached = 0
    for number, raw, line in _lines(path):
        step = None if isinstance(line, ValueError) else line.get("step")
        if not isinstance(step, int) and reached < last_step:
            raise _foreign(path, number, str(line) if isinstance(line, ValueError) else "no whole number under 'step'")
        if not isinstance(step, int) or step > last_step:
            break
        kept.append(raw + b"\n")
        reached = step
    replace_file(path, b"".join(kept).decode())


def _foreign(path: Path, number: int, wrong: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path}:{number}: {wrong}. A kill only cuts off the last line, so something else changed this file. Repair or "
        "remove the line."
    )


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | ValueError]]:
    """Yield each line's number, raw bytes (without newline) and content. Unreadable content is a ValueError."""
    try:
        with open(path, "rb", opener=regular_file) as file:
            content = file.read()
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunDirectoryError(f"{path}: cannot be read: {error.strerror or error}.") from error
    pieces = content.split(b"\n")
    for number, raw in enumerate(pieces, start=1):
        if not raw.strip():
            continue
        try:
            line = json.loads(raw)
            if not isinstance(line, dict):
                raise ValueError("it is not a JSON object")
        except ValueError as error:
            # The piece after the last newline may come from a write that was cut short.
            if number < len(pieces):
                yield number, raw, ValueError(f"unreadable line ({error})")
        else:
            yield number, raw, line
