"""Compile the templates of models so that what a rendering does is paid from a budget: Jinja, with meters.

A template is a program that comes with a model. The sandbox of transformers, whose filters, functions and tags are
taken over as they are, keeps it from files and from Python's insides, not from loops without end or a string of 10 GB.
Here each rendering has a budget of steps. A step is a node of the template that is evaluated, or 16 characters that are
written or read; a budget counts work and no time, so that the same row renders or fails on every machine:

- every body of a loop, macro or block begins by spending the number of its nodes;
- whatever is written, joined, compared or given to a filter, test or function spends its size, that of lists and
  mappings with everything in them, as one list may stand in another a thousand times;
- what would become larger than what it is made of (`'a' * n`, `replace`, `center`, a width in a format) spends the size
  of its result before it is made.

What a template renders to is the same as with transformers.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, ClassVar, cast

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

import spurline_text.chats.template_budget as size_of
from spurline_text.chats.template_budget import CALL, STEP, Budget, Growth, TemplateTooCostlyError, require_bits

MAX_CHARACTERS = 1 << 17
"""Of a template; those of known models have up to some 20,000."""
_SHORT = 64
"""Characters of a text that is not weighed, only the node that names it."""
_MAX_DATE = 1000


class BudgetContext(Context):
    """The variables of a rendering, with its budget."""

    budget: Budget

    def derived(self, locals: dict[str, Any] | None = None) -> BudgetContext:
        context = cast("BudgetContext", super().derived(locals))
        context.budget = self.budget
        return context


@pass_context
def _tick(context: BudgetContext, steps: int) -> bool:
    context.budget.spend(steps)
    return True


@pass_context
def _weighed(context: BudgetContext, value: Any) -> Any:
    if type(value) is not str:
        context.budget.weigh(value)
    elif len(value) >= _SHORT:
        context.budget.spend(len(value) >> STEP)
    return value


@pass_context
def _made(context: BudgetContext, value: Any) -> Any:
    return context.budget.made(value)


_METERS = {"spurline tick": _tick, "spurline weighed": _weighed, "spurline made": _made}
"""By names that no template can write."""
_SPENDING = (nodes.Const, nodes.TemplateData, nodes.Add, nodes.Sub, nodes.Concat)
"""What needs no weighing: it is as large as the template writes it, or its parts are weighed."""
_COMPARED_BY_SIZE = frozenset({"in", "notin"})


class _Metered(NodeTransformer):
    """Puts the meters into a parsed template."""

    def __init__(self) -> None:
        self._visited = 0

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        self._visited += 1 + (len(node.data) >> STEP if isinstance(node, nodes.TemplateData) else 0)
        return super().generic_visit(node, *args, **kwargs)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_weigh(child) for child in node.nodes]
        return node

    visit_Concat = visit_Output  # noqa: N815

    def visit_Add(self, node: nodes.BinExpr) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.left, node.right = _weigh(node.left), _weigh(node.right)
        return node

    visit_Sub = visit_Add  # noqa: N815

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        values = [node.expr, *(operand.expr for operand in node.ops)]
        # A text or number of the template's own differs from a list at the first look, but is looked for in all of it.
        if not any(isinstance(value, nodes.Const) for value in values):
            node.expr = _weigh(node.expr)
            for operand in node.ops:
                operand.expr = _weigh(operand.expr)
        for operand in node.ops:
            if operand.op in _COMPARED_BY_SIZE and not isinstance(
                operand.expr, (nodes.Filter, nodes.List, nodes.Tuple)
            ):
                operand.expr = _weigh(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _metered("spurline made", node)
        node.arg = _weigh(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.key = _weigh(node.key)
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self._visit_body(node)
        if node.test is not None:
            node.test = nodes.And(_ticking(1, node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self._visit_body(node)
        return node

    visit_CallBlock = visit_Macro  # noqa: N815
    visit_Block = visit_Macro  # noqa: N815

    def _visit_body(self, node: Any) -> None:
        before = self._visited
        self.generic_visit(node)
        tick = nodes.ExprStmt(_ticking(self._visited - before, node), lineno=node.lineno)
        node.body = [tick, *node.body]


def _metered(meter: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, meter, [], [], None, None, lineno=node.lineno)


def _ticking(steps: int, node: nodes.Node) -> nodes.Filter:
    return _metered("spurline tick", nodes.Const(steps, lineno=node.lineno))


def _weigh(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, _SPENDING) else _metered("spurline weighed", node)


_FREE_FILTERS = {"length", "count", "default", "d", "first", "last", "abs", "attr", "items"}
"""Those that look at no more than the outside, or one, of what they are given."""
_SIMPLE_FILTERS = {"trim", "lower", "upper", "title", "capitalize", "string", "safe"}
"""Those that make, of a text alone, a text of about its size."""
_ITEMWISE_FILTERS = {"map", "select", "reject", "selectattr", "rejectattr", "list", "reverse"}
"""Those that look at the outside of a list's items; the filters and tests they are told to use spend for the rest."""
_FILTER_GROWTH: dict[str, Growth] = {
    "replace": size_of.replaced,
    "join": size_of.joined,
    "indent": size_of.indented,
    "center": size_of.as_wide,
    "batch": size_of.grouped,
    "slice": size_of.grouped,
    "tojson": size_of.as_json,
    "format": size_of.percent_formatted,
    "round": size_of.rounded,
    "sum": size_of.summed,
    "int": size_of.as_number,
    "float": size_of.as_number,
}
_LEFT_OUT = {"pprint", "striptags", "urlize", "wordwrap", "xmlattr"}
"""Filters for web pages and terminals whose time grows faster than what they are given."""
_FREE_TESTS = {
    "boolean",
    "callable",
    "defined",
    "false",
    "filter",
    "float",
    "integer",
    "iterable",
    "mapping",
    "none",
} | {*("number", "sameas", "sequence", "string", "test", "true", "undefined", "escaped")}
_EQUALITY_TESTS = {"eq", "equalto", "==", "ne", "!="}
_TEST_GROWTH: dict[str, Growth] = {
    "odd": size_of.of_numbers,
    "even": size_of.of_numbers,
    "divisibleby": size_of.of_numbers,
}
_METHOD_GROWTH: dict[str, Growth] = {
    "replace": size_of.replaced,
    "join": lambda budget, separator, items: size_of.joined(budget, items, separator),
    "center": size_of.as_wide,
    "ljust": size_of.as_wide,
    "rjust": size_of.as_wide,
    "zfill": size_of.as_wide,
    "split": size_of.pieces,
    "rsplit": size_of.pieces,
    "splitlines": lambda budget, text, *_, **__: size_of.pieces(budget, text, "\n"),
    "format": size_of.brace_formatted,
    "format_map": size_of.brace_formatted,
}
_SMALL_METHODS = {
    "startswith",
    "endswith",
    "strip",
    "lstrip",
    "rstrip",
    "removeprefix",
    "removesuffix",
    "find",
    "count",
}
"""Of texts, with one argument: what they return is no larger than the text."""
_PLAIN_METHODS = {*_SMALL_METHODS, "split", "rsplit", "replace", "upper", "lower", "title", "join", "splitlines"}
_OF_MAPPINGS = frozenset(dir(dict))
_LEFT_OUT_METHODS = {
    "encode",
    "expandtabs",
    "from_bytes",
    "maketrans",
    "striptags",
    "to_bytes",
    "translate",
    "unescape",
}


def _guarded(name: str, function: Callable[..., Any], growth: Growth | None) -> Callable[..., Any]:
    """The filter or test, spending what it is given and what it makes."""
    passed = getattr(function, "jinja_pass_arg", None)
    leading = passed.name if passed is not None else ""
    simple = name in _SIMPLE_FILTERS
    compares = name in _EQUALITY_TESTS
    lazy = name in _ITEMWISE_FILTERS

    @pass_context
    def guarded(context: BudgetContext, value: Any = "", *args: Any, **kwargs: Any) -> Any:
        budget = context.budget
        if type(value) is str and not kwargs:
            if simple and not args:
                budget.spend(1 + (len(value) >> STEP - 1))
                return function(value)
            if compares and len(args) == 1 and type(args[0]) is str:
                budget.spend(1 + (len(value) >> STEP))
                return function(value, args[0])
        if growth is size_of.joined and isinstance(value, Iterator):
            value = list(cast("Iterator[Any]", value))
        if not lazy:
            budget.weigh(value)
        elif hasattr(value, "__len__"):
            budget.spend(2 * len(value))
        if args or kwargs:
            budget.weigh((args, kwargs))
        if growth is not None:
            budget.spend(growth(budget, value, *args, **kwargs) >> STEP)
        if not leading:
            return budget.made(function(value, *args, **kwargs))
        lead = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}[leading]
        return budget.made(function(lead, value, *args, **kwargs))

    return guarded


def _date(strftime_now: Callable[[str], str], layout: str) -> str:
    if len(layout) > _MAX_DATE:
        raise TemplateTooCostlyError(f"it writes a date of more than {_MAX_DATE} characters")
    return strftime_now(layout)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up, with meters."""

    context_class: ClassVar[type[Context]] = BudgetContext
    intercepted_binops: ClassVar[frozenset[str]] = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        original = _compile_jinja_template("").environment
        super().__init__(
            trim_blocks=original.trim_blocks,
            lstrip_blocks=original.lstrip_blocks,
            extensions=[type(extension) for extension in original.extensions.values()],
        )
        self.globals.update(original.globals)
        self.globals["strftime_now"] = lambda layout: _date(original.globals["strftime_now"], layout)
        del self.globals["lipsum"]
        for name, function in original.filters.items():
            self.filters[name] = (
                function if name in _FREE_FILTERS else _guarded(name, function, _FILTER_GROWTH.get(name))
            )
        for name, function in original.tests.items():
            self.tests[name] = function if name in _FREE_TESTS else _guarded(name, function, _TEST_GROWTH.get(name))
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters.update(_METERS)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Metered().visit(source), *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        # What jinja does, faster for the two most frequent cases; this pays for the meters.
        kind = type(obj)
        if kind is dict and attribute not in _OF_MAPPINGS:
            value = obj.get(attribute, self)
            return value if value is not self else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _PLAIN_METHODS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and type(left) is int:
            return left % right
        budget = cast("BudgetContext", context).budget
        if operator == "%":
            if isinstance(left, (str, bytes)):
                budget.weigh(left)
                budget.spend(size_of.percent_formatted(budget, left, right) >> STEP)
        elif isinstance(left, (int, float)) and isinstance(right, (int, float)):
            if isinstance(left, int) and isinstance(right, int):
                bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
                require_bits(bits)
        elif operator == "*":
            pairs: tuple[tuple[Any, Any], ...] = ((left, right), (right, left))
            for items, times in pairs:
                if isinstance(times, int) and hasattr(items, "__len__"):
                    budget.spend(len(cast("Any", items)) * max(0, times) >> (STEP if isinstance(items, str) else 0))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja's
        budget = cast("BudgetContext", __context).budget
        kind = type(__obj)
        if kind is types.BuiltinMethodType and len(args) == 1 and __obj.__name__ in _SMALL_METHODS:
            # Most calls of most templates: `content.startswith('<think>')`.
            owner, argument = __obj.__self__, args[0]
            if type(owner) is str and type(argument) is str and len(argument) < _SHORT:
                budget.spend(1 + (len(owner) >> STEP))
                return __obj(argument)
        budget.spend(CALL)
        if kind is Macro or kind is LoopContext:
            return budget.made(super().call(__context, __obj, *args, **kwargs))
        # Jinja gives what a loop or block has set to functions that take the context.
        given = {name: value for name, value in kwargs.items() if name != "_loop_vars" and name != "_block_vars"}
        method = getattr(__obj, "__wrapped__", __obj) if kind is types.FunctionType else __obj
        if type(method) is types.BuiltinMethodType or type(method) is types.MethodType:
            name, owner = method.__name__, method.__self__
            if name in _LEFT_OUT_METHODS:
                raise SecurityError(f"the method {name!r} is not there for templates")
            if args and isinstance(args[0], Iterator):
                args = (list(cast("Iterator[Any]", args[0])), *args[1:])
            if isinstance(owner, (str, list, tuple, range)):
                budget.weigh(owner)
            if args or given:
                budget.weigh((args, given))
            if isinstance(owner, str) and (growth := _METHOD_GROWTH.get(name)) is not None:
                budget.spend(growth(budget, owner, *args, **given) >> STEP)
        elif args or given:
            budget.weigh((args, given))
        return budget.made(super().call(__context, __obj, *args, **kwargs))


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    return _Environment().from_string(template)


def compile_template(template: str) -> jinja2.Template:
    """The template, ready to render. Raises ValueError with what is wrong with it."""
    if len(template) > MAX_CHARACTERS:
        raise ValueError(
            f"it has {len(template)} characters, and those of known models have far fewer than the most "
            f"that is read, {MAX_CHARACTERS}"
        )
    try:
        return _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, SyntaxError, ValueError, ArithmeticError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("its expressions or blocks are nested too deeply") from error
