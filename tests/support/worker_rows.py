"""Datasets that tokenization workers can load, some of which set traps for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from spurline.config.run_config import DataConfig, DatasetConfig
from spurline.errors import DataError
from spurline.protocols.tokenization import DatasetToTokenize


class TrappedRows:
    """Rows given in the test. traps: row -> what happens when a worker reads it.

    `kill`: SIGKILL. `hang`: it never returns. `slow`: after two seconds. Anything else is the text of a DataError,
    wherever the row is read.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], traps: Mapping[int, str] | None = None, label: str = "rows"
    ) -> None:
        self.label = label
        self._rows, self._traps = rows, dict(traps or {})
        self._home = os.getpid()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Mapping[str, Any]:
        trap = self._traps.get(row)
        if trap not in (None, "kill", "hang", "slow"):
            raise DataError(f"{self.location(row)}: {trap}")
        if os.getpid() != self._home:
            self._spring(trap)
        return self._rows[row]

    def location(self, row: int) -> str:
        return f"{self.label}.jsonl:{row + 1}"

    def fingerprint(self) -> str:
        return self.label

    def _spring(self, trap: str | None) -> None:
        if trap == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if trap in ("hang", "slow"):
            time.sleep(3600 if trap == "hang" else 2)


def chat_rows(count: int) -> list[dict[str, Any]]:
    """Short conversations that differ in length."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"question {number}"},
                {"role": "assistant", "content": "answer " * (1 + number % 5)},
            ]
        }
        for number in range(count)
    ]


def source(dataset: Any, **settings: Any) -> DatasetToTokenize:
    """Return a dataset with its settings, of chat rows by default."""
    return DatasetToTokenize(dataset, DatasetConfig(name="rows", **{"format": "chat", **settings}))


def data_config(*sources: DatasetToTokenize, **settings: Any) -> DataConfig:
    return DataConfig(train=tuple(item.config for item in sources), **settings)


def large_block(_: object) -> bytes:
    """Return more than a pipe holds, in place of a block."""
    return bytes(50_000_000)


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True
