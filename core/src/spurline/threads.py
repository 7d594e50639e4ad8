"""Call functions on daemon threads. A call that hangs does not keep the process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def call_on_daemon(name: str, function: Callable[P, T], *arguments: P.args, **keywords: P.kwargs) -> Future[T]:
    """Call the function with these arguments on a new daemon thread, which gets the name `name`.

    Returns a future with the call's result or error. Wait for it with a timeout.
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
