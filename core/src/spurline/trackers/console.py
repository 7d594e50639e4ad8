"""Show progress on the terminal: a live bar, or plain lines when the output is a file or a pipe.

This tracker is always on. In reinforcement learning it shows the reward, since the loss does not tell whether the model
improves. For preference pairs it shows how often, and by how much, the model prefers the chosen answer.
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
        # If the process was started with stdout closed, `sys.stdout` is None.
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
        self._total_steps = info.total_steps
        for note in info.notes:
            self._print(note)
        # With FORCE_COLOR, rich treats a log file as a terminal. A moving bar needs a real terminal.
        is_live = self._console.is_terminal and self._console.file.isatty() and not self._console.is_dumb_terminal
        if is_live and self._progress is None:
            self._open_bar(info)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Move the bar, or print a line if one is due. Evaluation results are always printed."""
        self._observe(metrics)
        fields = self._fields(step, metrics)
        if self._progress is not None and self._task is not None:
            # The least important fields come last, and are left out on a narrow terminal.
            while len(_SEPARATOR.join(fields)) > self._console.width - 28 and len(fields) > 1:
                fields.pop()
            label, readout = self._step_label(step), _SEPARATOR.join(fields)
            self._progress.update(self._task, completed=step, description=label, readout=readout)
        elif self._is_first or step % self._config.every_steps == 0 or step == self._total_steps:
            self._print(_SEPARATOR.join([self._step_label(step), *fields]))
        self._is_first = False
        evaluated = scores_of(metrics)
        if evaluated:
            named = [(name.removeprefix("eval/"), value) for name, value in evaluated.items()]
            results = [f"{name} {value:{'.1%' if 'pass@' in name else '.4g'}}" for name, value in named]
            self._print(_SEPARATOR.join([f"eval at {self._step_label(step)}", *results]))

    def warn(self, step: int, kind: str, words: str) -> None:
        """Print a warning, unless a warning of this kind was printed a few steps ago."""
        last = self._warned_at.get(kind)
        if last is None or step - last >= _STEPS_BETWEEN_WARNINGS:
            self._warned_at[kind] = step
            self._print(f"warning at {self._step_label(step)}: {words}")

    def flush(self) -> None:
        """Do nothing, since each line is written when it is printed."""

    def close(self) -> None:
        """Stop the bar and show the cursor again."""
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
        if "rollout/tokens" in metrics and (generation_s := seconds_of_generation(metrics)):
            self._generated.add(metrics["rollout/tokens"])
            self._generation_s.add(generation_s)

    def _fields(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        fields = _progress_fields(metrics)
        step_s = self._step_s.value
        # The first step loads and compiles, so its time says nothing about later steps.
        if step_s is not None and not self._is_first and self._total_steps is not None and step < self._total_steps:
            fields.append(f"ETA {clock(step_s * (self._total_steps - step))}")
        if speed := self._speed():
            fields.append(speed)
        if "lr" in metrics:
            fields.append(f"lr {metrics['lr']:.1e}")
        if "grad_norm" in metrics:
            fields.append(f"grad {metrics['grad_norm']:.2f}")
        return fields

    def _speed(self) -> str:
        """Return tokens per second of training time and, if there is generation, per second of generation time."""
        tokens, seconds = self._tokens.value, self._training_s.value
        if tokens is None or not seconds:
            return ""
        trained = f"{quantity(tokens / seconds)} tokens/s"
        generated, seconds = self._generated.value, self._generation_s.value
        return f"gen {quantity(generated / seconds)}, train {trained}" if generated is not None and seconds else trained

    def _step_label(self, step: int) -> str:
        return f"step {step}/{self._total_steps}" if self._total_steps is not None else f"step {step}"

    def _print(self, line: str) -> None:
        """Print a line above the bar, without markup, colours or escapes."""
        self._console.print(printable(line), markup=False, highlight=False, emoji=False, soft_wrap=True)


class _WhileItCanBeWritten:
    """A file that ignores failed writes, for example to `| head` or to a full disk. Such a write must not end a run."""

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
            # Buffered text must not fail again when the process ends.
            with suppress(OSError):
                write_nowhere(self._file.fileno())
            self._file = NULL_FILE


def _progress_fields(metrics: Mapping[str, float]) -> list[str]:
    if "reward/mean" not in metrics:
        shown = {"loss": "loss {:.3f}", "preference/accuracy": "accuracy {:.0%}", "preference/margin": "margin {:.3f}"}
        return [text.format(metrics[name]) for name, text in shown.items() if name in metrics]
    fields = [f"reward {metrics['reward/mean']:.3f}"]
    if "staleness/mean" in metrics:
        fields.append(f"age {metrics['staleness/mean']:.1f}")
    if metrics.get("groups/zero_variance", 0.0) > 0:
        fields.append(f"equal groups {metrics['groups/zero_variance']:.0%}")
    return fields
