"""Calls on threads that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def call_on_daemon(name: str, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> Future[T]:
    """Call the function on a new daemon thread, which cannot keep the process alive if the call hangs.

    Args:
        name: Name of the thread.
        function: The function to call.
        arguments: Its arguments.
        keywords: Its named arguments.

    Returns:
        The call's result or error. Wait for it with a time limit.
    """
    done: Future[T] = Future()

    def work() -> None:
        try:
            result = function(*arguments, **keywords)
        except BaseException as error:  # noqa: BLE001 - raised where the result is awaited
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=work, name=name, daemon=True).start()
    return done
