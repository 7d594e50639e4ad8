"""What runs in a worker process of `killable_worker`: read arguments, call the function, write the result.

`python -m spurline.rl.rewards.worker_process MODULE:FUNCTION`. One JSON line each way per call, after a first line
that says whether the function could be imported. The process ends with its parent, also in the middle of a call.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
from typing import Any, TextIO

MEMORY_LIMIT_BYTES = 8 << 30
"""Address space of a worker: a result with billions of digits must not take the machine down."""


def main(function: str) -> None:
    # What the function prints must not get between the replies.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _limit_memory()
    try:
        module, _, name = function.partition(":")
        call = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - told to the parent
        _write(replies, {"error": _describe(error)})
        return
    _write(replies, {"ready": True})
    calls: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(calls,), daemon=True).start()
    while True:
        arguments = json.loads(calls.get())
        try:
            reply = {"value": call(*arguments)}
        except MemoryError:
            reply = {"memory": True}
        except Exception as error:  # noqa: BLE001 - told to the parent
            reply = {"error": _describe(error)}
        _write(replies, reply)


def _read_calls(calls: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        calls.put(line)
    # The parent is gone. The main thread may be lost in a call for ever.
    os.kill(os.getpid(), signal.SIGTERM)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:
        # Windows has no such limit.
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _write(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1])
