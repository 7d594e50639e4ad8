"""Which engine gets a request: the one with least to do, or the one that knows the prompt already.

Place on the way: request's name and load of the ready engines -> engine. No waiting here: that is `pool.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

_SLACK = 16
"""Requests that an engine may have more than the least busy one, and still be preferred for its prefix cache."""
_REMEMBERED = 8192
"""Prompts; older ones are forgotten, so that memory has a bound."""


class Loaded(Protocol):
    """load: requests that it has."""

    @property
    def load(self) -> int: ...


E = TypeVar("E", bound=Loaded)


class Router:
    """Remembers which engine each prompt was last sent to."""

    def __init__(self) -> None:
        self._homes: OrderedDict[str, Loaded] = OrderedDict()

    def choose(self, name: str, engines: Sequence[E]) -> E:
        """name: of the request; what stands before ` sample ` names the prompt. engines: at least one."""
        prompt = name.partition(" sample ")[0]
        chosen = min(engines, key=lambda engine: engine.load)
        home = self._homes.get(prompt)
        for engine in engines:
            if engine is home and engine.load <= chosen.load + _SLACK:
                chosen = engine
        self._homes[prompt] = chosen
        self._homes.move_to_end(prompt)
        if len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return chosen
