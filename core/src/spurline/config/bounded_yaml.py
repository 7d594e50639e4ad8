"""Parse YAML that somebody else may have written: within bounds, and with the line of whatever is wrong.

Round-trip mode of ruamel is YAML 1.2 (1e-5 is a float, `on` is a string), refuses duplicate keys and keeps lines.
The bounds are checked while nodes are composed, before any value is made of them: an alias counts as everything that it
stands for, so that ten lines of aliases to aliases do not become a billion values. Nothing here knows of settings.
"""

# The parser's classes have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any, cast

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.constructor import RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 64
MAX_VALUES = 50_000
"""Keys, values and lists of a file, those that an alias repeats counted each time."""
_MAX_NUMBER = 200
"""Characters of a number or a date. Longer ones take the time of their square to be read."""

_TAG = "tag:yaml.org,2002:"
_TAGS = {f"{_TAG}{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge")}
_NUMBERS = {f"{_TAG}{kind}" for kind in ("int", "float", "timestamp")}


class BadYamlError(Exception):
    """Text that is not read. line: 1-based, None where the parser names none. fix: a sentence, or nothing."""

    def __init__(self, problem: str, line: int | None, fix: str) -> None:
        super().__init__(problem)
        self.line, self.fix = line, fix


def parse_yaml(text: str) -> Any:
    """The text as ruamel's containers, which know their lines; None for empty text. Raises BadYamlError."""
    if len(text) > MAX_CHARACTERS:
        raise BadYamlError(f"it has {len(text)} characters; the most that are read are {MAX_CHARACTERS}", None, "")
    parser: Any = YAML(typ="rt")
    parser.Composer, parser.Constructor = _BoundedComposer, _Constructor
    try:
        return parser.load(text)
    except ReaderError as error:
        line = text.count("\n", 0, int(cast("Any", error).position)) + 1
        fix = " Take the character out; inside double quotes \\0 or \\a may be written."
        raise BadYamlError(_first_line(error), line, fix) from None
    except YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        raise BadYamlError(_first_line(error), mark.line + 1 if mark is not None else None, _fix(error)) from None
    except Exception as error:
        # As in _Constructor, where the parser knows no place.
        raise BadYamlError(f"the parser failed with {type(error).__name__}: {error}", None, "") from error


class _BoundedComposer(Composer):
    """Counts what it composes; sizes: of each finished node, by its id, as every node stays in the tree."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        # YAML lets a later anchor take the place of one; a warning for each would be as long as the file.
        self.warn_double_anchors = False
        self._sizes: dict[int, int] = {}
        self._composed = 0
        self._nesting = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        mark = self.parser.peek_event().start_mark
        if self.parser.check_event(AliasEvent):
            node = super().compose_node(parent, index)
            if id(node) not in self._sizes:
                raise _error("an alias stands inside the value of its own anchor", mark)
            self._count(self._sizes[id(node)], mark)
            return node
        before, self._nesting = self._composed, self._nesting + 1
        if self._nesting > MAX_DEPTH:
            raise _error(f"lists and mappings are nested more than {MAX_DEPTH} deep", mark)
        self._count(1, mark)
        node = super().compose_node(parent, index)
        self._nesting -= 1
        _check_node(node)
        self._sizes[id(node)] = self._composed - before
        return node

    def _count(self, values: int, mark: Any) -> None:
        self._composed += values
        if self._composed > MAX_VALUES:
            raise _error(
                f"there are more than {MAX_VALUES} values, those that aliases repeat counted each time; long lists "
                "belong into a data file",
                mark,
            )


class _Constructor(RoundTripConstructor):
    """Says where a value stands of which none can be made, such as the date 2024-13-45."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except YAMLError:
            raise
        except Exception as error:  # noqa: BLE001 - the parser's own code fails on some texts, such as an empty !!int
            raise _error(f"{str(node.value)[:40]!r} is no value of its kind ({error})", node.start_mark) from None


def _check_node(node: ScalarNode | SequenceNode | MappingNode) -> None:
    tag, mark = str(node.tag), node.start_mark
    if tag not in _TAGS:
        raise _error(f"the tag {tag.replace(_TAG, '!!')[:60]} is not read; write the value without a tag", mark)
    if not isinstance(node, ScalarNode):
        return
    if tag in _NUMBERS and len(node.value) > _MAX_NUMBER:
        raise _error(f"a number has {len(node.value)} characters; text needs quotes", mark)
    if not node.value.isascii():
        try:
            node.value.encode()
        except UnicodeEncodeError:
            raise _error("half a surrogate pair is no character; write the character itself", mark) from None


def _error(problem: str, mark: Any) -> MarkedYAMLError:
    return MarkedYAMLError(problem=problem, problem_mark=mark)


def _first_line(error: Exception) -> str:
    problem: object = getattr(error, "problem", None) or str(error).strip().splitlines()[0]
    return str(problem).rstrip(".")


def _fix(error: YAMLError) -> str:
    """What is usually wrong behind an error of the parser."""
    problem = str(getattr(error, "problem", ""))
    if "alias" in f"{problem} {getattr(error, 'context', '')}":
        return " Text that begins with `*` or `&` needs quotes."
    if "'\\t'" in problem:
        return " Indent with spaces, not with tabs."
    if "block" in problem or "mapping values" in problem:
        return (
            " Keys of one level begin in the same column, those of a section further to the right; text with `: ` "
            "needs quotes."
        )
    return ""
