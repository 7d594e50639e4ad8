"""The budget of a template's rendering, and what of it the functions of templates need before they are called.

A step is a node of the template that is evaluated, or 16 characters that are written or read. See `chat_template`.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from string import Formatter
from typing import Any, cast

import jinja2
from jinja2.utils import Namespace

STEP = 4
"""Characters of a step, as a power of two: 16."""
CALL = 8
"""Steps of calling a function, or of an item that a generator yields."""
MAX_BITS = 8192
"""Of a whole number."""
_MAX_INDENT = 64


class TemplateTooCostlyError(Exception):
    """A rendering spent its budget, or began what no budget is enough for."""


class Budget:
    """Steps that are left of one rendering."""

    __slots__ = ("left",)

    def __init__(self, steps: int) -> None:
        self.left = steps

    def spend(self, steps: int) -> None:
        # Fewer than none, such as the width -1 asks for, would be a way to more.
        if steps > 0:
            self.left -= steps
            if self.left < 0:
                raise _exhausted()

    def weigh(self, value: object) -> int:
        """Spend the size of a value, everything in it included, and return that."""
        before = left = self.left
        waiting = [value]
        while waiting:
            item: Any = waiting.pop()
            kind = type(item)
            if kind is str:
                left -= 1 + (len(item) >> STEP)
            elif kind is dict:
                left -= len(item)
                waiting += item
                waiting += item.values()
            elif kind is list or kind is tuple:
                left -= len(item)
                waiting += item
            else:
                left -= self._weigh_other(item, waiting)
            if left < 0:
                raise _exhausted()
        self.left = left
        return before - left

    @staticmethod
    def _weigh_other(item: Any, waiting: list[Any]) -> int:
        """Steps of a value of a rarer kind, without those of what is in it, which is put into `waiting`."""
        if item is None or isinstance(item, (float, jinja2.Undefined)):
            return 1
        if isinstance(item, range):
            # Its numbers are made one by one by what goes through it.
            return 1 + len(item)
        if isinstance(item, int):
            require_bits(item.bit_length())
            return 1
        if isinstance(item, (str, bytes)):
            return 1 + (len(item) >> STEP)
        if isinstance(item, Namespace):
            waiting.append(cast("Any", item)._Namespace__attrs)
            return CALL
        if isinstance(item, (Sequence, AbstractSet, Mapping, ValuesView)):
            waiting += item
            waiting += item.values() if isinstance(item, Mapping) else ()
            return 1 + len(item)
        return 1

    def made(self, value: Any) -> Any:
        """The value that a filter or function returned, its size spent without what stands in it."""
        kind = type(value)
        if kind is str:
            self.spend(len(value) >> STEP)
        elif kind is types.GeneratorType:
            return self._counted(value)
        elif isinstance(value, int):
            require_bits(value.bit_length())
        elif hasattr(value, "__len__") and not isinstance(value, range):
            self.spend(len(value) >> 2)
        return value

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self.spend(CALL)
            yield item


def _exhausted() -> TemplateTooCostlyError:
    return TemplateTooCostlyError("it has taken all steps that a rendering may take")


def require_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateTooCostlyError(f"it computes a number of more than {MAX_BITS} bits")


Growth = Callable[..., int]
"""Characters that a result may have beyond those of what it is made of; takes the budget, then what the function
takes, by the same names."""


def replaced(budget: Budget, text: Any, old: Any, new: Any, count: Any = None) -> int:
    return str(text).count(str(old)) * len(str(new))


def joined(budget: Budget, items: Any, d: Any = "", attribute: Any = None) -> int:
    return len(items) * len(str(d))


def indented(budget: Budget, text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return (str(text).count("\n") + 1) * (width if isinstance(width, int) else len(width))


def as_wide(budget: Budget, text: Any, width: Any = 80, *_: Any) -> int:
    return max(0, width)


def grouped(budget: Budget, items: Any, linecount: int = 0, fill_with: Any = None, slices: int = 0) -> int:
    return max(0, linecount, slices) << STEP


def pieces(budget: Budget, text: str, separator: Any = None, *_: Any, sep: Any = None, **__: Any) -> int:
    """Each piece takes the memory of some 60 characters, even when it is empty."""
    separator = separator if isinstance(separator, str) else sep
    return (text.count(separator) if separator else len(text) // 2) << 6


def as_json(budget: Budget, value: Any, *_: Any, indent: Any = None, separators: Any = None, **__: Any) -> int:
    width = indent if isinstance(indent, int) else len(indent or "")
    if width > _MAX_INDENT or sum(map(len, separators or ())) > _MAX_INDENT:
        raise TemplateTooCostlyError(f"it indents JSON, or separates its values, by more than {_MAX_INDENT} characters")
    if not width:
        return 0
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for item in level
            if isinstance(item, (dict, list, tuple))
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
    return budget.weigh(value) * width * depth


_WIDE = re.compile(r"[%)][-+ #0.\d]*(?:\d{6}|\*)")


def percent_formatted(budget: Budget, text: Any, *args: Any, **kwargs: Any) -> int:
    text = str(text)
    if _WIDE.search(text):
        raise TemplateTooCostlyError("it formats with a width of more than 99,999 characters")
    return text.count("%") * (budget.weigh((args, kwargs)) << STEP) + sum(map(int, re.findall(r"\d{1,6}", text)))


def brace_formatted(budget: Budget, text: Any, *args: Any, **kwargs: Any) -> int:
    size, widths = budget.weigh((args, kwargs)) << STEP, 0
    for _, field, spec, _ in Formatter().parse(str(text)):
        if field is None:
            continue
        if "{" in (spec or ""):
            raise TemplateTooCostlyError("it formats with a width that is a value itself")
        widths += size + sum(int(digits[:12]) for digits in re.findall(r"\d+", spec or ""))
    return widths


def rounded(budget: Budget, value: Any, precision: Any = 0, *_: Any, **__: Any) -> int:
    if not isinstance(value, (int, float)) or abs(precision) > 300:
        raise TypeError("only a number can be rounded, to 300 digits at most")
    return 0


def summed(budget: Budget, items: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, (int, float)):
        raise TypeError("only numbers can be summed")
    return 0


def as_number(budget: Budget, value: Any, *_: Any, **__: Any) -> int:
    if isinstance(value, str) and len(value) > MAX_BITS // 4:
        raise TemplateTooCostlyError(f"it computes a number of more than {MAX_BITS} bits")
    return 0


def of_numbers(budget: Budget, value: Any, *_: Any) -> int:
    if isinstance(value, str):
        # The operator behind these tests would format it.
        raise TypeError("only a number can be odd, even or divisible")
    return 0
