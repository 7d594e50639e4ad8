"""Show progress on the terminal: a live bar, or plain lines when the output is a file or a pipe.

This tracker is always on. Steps of reinforcement learning show their reward instead of the loss, which tells nothing
there; steps of preference pairs also show how often and how far the chosen answer is ahead.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any, cast

from rich._null_file import NULL_FILE
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Column

from spurline.protocols.tracker import RunInfo
from spurline.terminal import printable, write_nowhere
from spurline.trackers.configs import ConsoleTrackerConfig
from spurline.trackers.readout import Smoothed, clock, quantity, scores_of, seconds_of_generation, training_seconds

_SEPARATOR = "  "
_STEPS_BETWEEN_WARNINGS = 50


class ConsoleTracker:
    """Shows step, loss or reward, learning rate, tokens/s and the time left, by default on stdout."""

    def __init__(self, config: ConsoleTrackerConfig, console: Console | None = None) -> None:
        self._config = config
        # Python has no stdout in a process that was started with a closed one.
        output = None if sys.stdout is None else cast("IO[str]", _WhileItCanBeWritten(sys.stdout))
        self._console = console or Console(file=output)
        self._total_steps: int | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._is_first = True
        self._tokens = Smoothed(span=20)
        self._training_s = Smoothed(span=20)
        self._step_s = Smoothed(span=100)
        self._generated = Smoothed(span=20)
        self._generation_s = Smoothed(span=20)
        self._warned_at: dict[str, int] = {}

    def start(self, info: RunInfo) -> None:
        """Print the notes on the start, and open the live bar when the output is a terminal."""
        self._total_steps = info.total_steps
        for note in info.notes:
            self._print(note)
        # FORCE_COLOR makes rich take a log file for a terminal; a moving bar belongs on real ones only.
        is_live = self._console.is_terminal and self._console.file.isatty() and not self._console.is_dumb_terminal
        if is_live and self._progress is None:
            self._open_bar(info)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar, or print a line when one is due; warnings and evaluation results are always printed."""
        self._observe(metrics)
        fields = self._fields(step, metrics)
        if self._progress is not None and self._task is not None:
            readout = _SEPARATOR.join(_drop_until_fit(fields, self._console.width - 28))
            self._progress.update(self._task, completed=step, description=self._step_label(step), readout=readout)
        elif self._is_first or step % self._config.every_steps == 0 or step == self._total_steps:
            plain = [text for name, text in fields if name != "grad_norm"]
            self._print(_SEPARATOR.join([self._step_label(step), *plain]))
        self._is_first = False
        evaluated = scores_of(metrics)
        if evaluated:
            self._print(self._evaluation_line(step, evaluated))

    def warn(self, step: int, kind: str, words: str) -> None:
        """Print what is off, each kind of it at most once in a while."""
        last = self._warned_at.get(kind)
        if last is None or step - last >= _STEPS_BETWEEN_WARNINGS:
            self._warned_at[kind] = step
            self._print(f"warning at {self._step_label(step)}: {words}")

    def flush(self) -> None:
        """Nothing to do: what is printed is out."""

    def close(self) -> None:
        """Stop the bar where it is and give the cursor back. May be called twice, or without start."""
        if self._progress is not None:
            progress, self._progress, self._task = self._progress, None, None
            progress.stop()
            atexit.unregister(self.close)

    def _open_bar(self, info: RunInfo) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
            TextColumn("{task.fields[readout]}", markup=False),
            console=self._console,
            expand=True,
        )
        label = self._step_label(info.resume_step)
        self._task = self._progress.add_task(label, total=info.total_steps, completed=info.resume_step, readout="")
        # An exception that skips close() must not leave the terminal without a cursor.
        atexit.register(self.close)
        self._progress.start()

    def _observe(self, metrics: Mapping[str, float]) -> None:
        training_s = training_seconds(metrics)
        if training_s is not None and "tokens" in metrics:
            self._tokens.add(metrics["tokens"])
            self._training_s.add(training_s)
        if "time/step" in metrics and not self._is_first:
            self._step_s.add(metrics["time/step"])
        if "rollout/tokens" in metrics and "time/generate" in metrics:
            self._generated.add(metrics["rollout/tokens"])
            self._generation_s.add(seconds_of_generation(metrics))

    def _fields(self, step: int, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Return name and text of each field in display order."""
        fields = _progress_fields(metrics)
        if "grad_norm" in metrics:
            fields.append(("grad_norm", f"grad {metrics['grad_norm']:.2f}"))
        if "lr" in metrics:
            fields.append(("lr", f"lr {metrics['lr']:.1e}"))
        speed = self._speed()
        if speed:
            fields.append(("tokens", speed))
        step_s = self._step_s.value
        # The first step loads and compiles; what it took says nothing about the others.
        if step_s is not None and not self._is_first and self._total_steps is not None and step < self._total_steps:
            fields.append(("eta", f"ETA {clock(step_s * (self._total_steps - step))}"))
        return fields

    def _speed(self) -> str:
        """Return tokens per second of training and, if there is some, of generation, each over its own time."""
        tokens, seconds = self._tokens.value, self._training_s.value
        if tokens is None or not seconds:
            return ""
        trained = f"{quantity(tokens / seconds)} tokens/s"
        generated, seconds = self._generated.value, self._generation_s.value
        return f"gen {quantity(generated / seconds)}, train {trained}" if generated is not None and seconds else trained

    def _step_label(self, step: int) -> str:
        return f"step {step}/{self._total_steps}" if self._total_steps is not None else f"step {step}"

    def _evaluation_line(self, step: int, evaluated: Mapping[str, float]) -> str:
        named = [(name.removeprefix("eval/"), value) for name, value in evaluated.items()]
        results = [f"{name} {value:{'.1%' if 'pass@' in name else '.4g'}}" for name, value in named]
        return _SEPARATOR.join([f"eval at {self._step_label(step)}", *results])

    def _print(self, line: str) -> None:
        """Print a line above the bar as it is: no markup, colours or escapes."""
        self._console.print(printable(line), markup=False, highlight=False, emoji=False, soft_wrap=True)


class _WhileItCanBeWritten:
    """A file whose failure ends no run, as when `| head` has read enough or the disk of a log is full."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        self._try("flush")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _try(self, method: str, *arguments: str) -> None:
        try:
            getattr(self._file, method)(*arguments)
        except OSError:
            # What is still buffered must not fail once more when the process ends.
            with suppress(OSError):
                write_nowhere(self._file.fileno())
            self._file = NULL_FILE


def _progress_fields(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the fields that show whether the model improves."""
    if "reward/mean" in metrics:
        fields = [("reward", f"reward {metrics['reward/mean']:.3f}")]
        equal = metrics.get("groups/zero_variance", 0.0)
        age = [("age", f"age {metrics['staleness/mean']:.1f}")] if "staleness/mean" in metrics else []
        return [*fields, *age, *([("equal", f"equal groups {equal:.0%}")] if equal > 0 else [])]
    fields = [("loss", f"loss {metrics['loss']:.3f}")] if "loss" in metrics else []
    if "dpo/accuracy" in metrics:
        fields.append(("accuracy", f"accuracy {metrics['dpo/accuracy']:.0%}"))
    if "dpo/margin" in metrics:
        fields.append(("margin", f"margin {metrics['dpo/margin']:.3f}"))
    return fields


def _drop_until_fit(fields: list[tuple[str, str]], width: int) -> list[str]:
    """Return the texts of the fields, without the least important ones if they exceed `width` columns."""
    texts = dict(fields)
    for dropped in ("grad_norm", "lr", "equal", "age", "tokens", "margin", "eta", "accuracy"):
        if len(_SEPARATOR.join(texts.values())) <= width:
            break
        texts.pop(dropped, None)
    return list(texts.values())
