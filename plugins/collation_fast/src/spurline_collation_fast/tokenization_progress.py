"""A progress bar for tokenization, on a terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text


class _RowsPerSecond(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:,.0f} rows/s" if task.speed else "")


@contextmanager
def show_progress(num_rows: int) -> Iterator[Callable[[int], None]]:
    """Yields a function to be called with each number of rows that are done. The bar goes when the work is done."""
    console = Console(stderr=True)
    columns = (
        TextColumn("tokenizing"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows"),
        _RowsPerSecond(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, get_time=time.monotonic
    ) as bar:
        task = bar.add_task("tokenizing", total=num_rows)
        yield lambda rows: bar.advance(task, rows)
