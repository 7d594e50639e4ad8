"""Small errors put into the source of functions, one at a time, to see whether tests notice.

A mutant swaps an operator (+ -, < <=, > >=, == !=), moves a whole number by one, or ends a range one early. Loops that
a mutation made endless are stopped after a number of turns.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_SWAPPED: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_MAX_TURNS = 20_000


@dataclass(frozen=True)
class Mutant:
    """function: whose source was changed. change: `before -> after` of the changed expression. namespace: the module's
    names, compiled anew as plain Python."""

    function: str
    change: str
    namespace: dict[str, Any]


def plain(module: ModuleType) -> dict[str, Any]:
    """The module's names as plain Python, unchanged: the source that mutants are made of."""
    return _compiled(_source(module))


def mutants(module: ModuleType) -> Iterator[Mutant]:
    """Every single mutation of every function of the module."""
    tree = _source(module)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for place, function in enumerate(functions):
        for number, node in enumerate(ast.walk(function)):
            for mutate in _mutations(node):
                changed = copy.deepcopy(tree)
                copied = [part for part in changed.body if isinstance(part, ast.FunctionDef)][place]
                target = list(ast.walk(copied))[number]
                before = ast.unparse(_shown(copied, target))
                mutate(target)
                after = ast.unparse(_shown(copied, target))
                yield Mutant(function.name, f"{before} -> {after}", _compiled(changed))


def _source(module: ModuleType) -> ast.Module:
    """Functions and imports; not the fallbacks around numba, nor its decorators."""
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    tree.body = [node for node in tree.body if not isinstance(node, ast.Try)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
            if ast.get_docstring(node):
                node.body = node.body[1:]
    return tree


def _mutations(node: ast.AST) -> list[Callable[[Any], None]]:
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in _SWAPPED:
        return [lambda target: setattr(target, "op", _SWAPPED[type(target.op)]())]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SWAPPED:
        return [lambda target: target.ops.__setitem__(0, _SWAPPED[type(target.ops[0])]())]
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return [lambda target: setattr(target, "value", target.value + 1)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range":
        return [_end_early]
    return []


def _end_early(call: ast.Call) -> None:
    call.args[-1] = ast.BinOp(call.args[-1], ast.Sub(), ast.Constant(1))


def _shown(function: ast.FunctionDef, node: ast.AST) -> ast.AST:
    """The smallest expression or simple statement around `node` that says where the change is."""
    parents = {child: parent for parent in ast.walk(function) for child in ast.iter_child_nodes(parent)}
    shown = node
    while not isinstance(shown, ast.stmt):
        parent = parents[shown]
        if isinstance(parent, ast.For | ast.While | ast.If | ast.FunctionDef):
            break
        shown = parent
    return shown


def _compiled(tree: ast.Module) -> dict[str, Any]:
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            turn = ast.Call(ast.Name("_one_turn", ast.Load()), [], [])
            node.test = ast.BoolOp(ast.And(), [turn, node.test])
    turns = 0

    def one_turn() -> bool:
        nonlocal turns
        turns += 1
        assert turns < _MAX_TURNS, "an endless loop"
        return True

    namespace: dict[str, Any] = {"_one_turn": one_turn}
    exec(compile(ast.fix_missing_locations(tree), "<mutant>", "exec"), namespace)
    return namespace
