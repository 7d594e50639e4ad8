"""Fixtures for plugin authors. Pytest loads them if spurline is installed. This module imports no heavy library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture
def spurline_chat_file(tmp_path: Path) -> Path:
    """Return a chat JSONL file of 64 short rows."""
    path = tmp_path / "chat.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"say {number}"},
                {"role": "assistant", "content": str(number) * (1 + number % 5)},
            ]
        }
        for number in range(64)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
