"""Changes of Python code, read from its syntax tree, and probes in it.

Only statements in bodies of functions change, without what nobody can notice: docstrings, log lines, the texts of
errors, `__repr__`, assertions, and code for type checkers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.planted.changes import Change

TURNED = {
    ast.Lt: ("<", ">="), ast.LtE: ("<=", ">"), ast.Gt: (">", "<="), ast.GtE: (">=", "<"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
MOVED = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOGGERS = {"log", "logger", "logging", "warnings"}
TEXTS = {"__repr__", "__str__"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def changes(source: str) -> Iterator[Change]:
    """Yield every change that the code offers, in the order of the lines."""
    text = _Text(source)
    for function, name in _functions(ast.parse(source), ""):
        if function.name in TEXTS or any("overload" in ast.unparse(each) for each in function.decorator_list):
            continue
        for node in _noticed(function):
            for kind, start, end, replacement in _of(node, text):
                yield Change(kind, name, start, end, replacement)


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the first and the last line of every function."""
    for function, name in _functions(ast.parse(source), ""):
        yield name, function.lineno, function.end_lineno or function.lineno


def with_probe(source: str, line: int, probe: str) -> str:
    """Return the code with a statement before the one of a function that stands on this line."""
    found: ast.stmt | None = None
    for parent in ast.walk(ast.parse(source)):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                for statement in block:
                    inside = statement.lineno <= line <= (statement.end_lineno or 0)
                    # Nothing can stand before an elif, which is a statement of its own to the parser.
                    if inside and not source.split("\n")[statement.lineno - 1].lstrip().startswith("elif"):
                        found = statement if found is None or statement.lineno > found.lineno else found
    if found is None:
        raise ValueError(f"no statement stands on line {line}")
    lines = source.split("\n")
    lines.insert(found.lineno - 1, " " * found.col_offset + probe)
    return "\n".join(lines)


class _Text:
    """Source code by characters, where the parser counts bytes in a line."""

    def __init__(self, source: str) -> None:
        self.source = source
        self._lines = source.split("\n")
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line) + 1)

    def at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[Function, str]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            if not any(ast.unparse(base).startswith("Protocol") for base in node.bases):
                yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, Function):
            yield node, prefix + node.name
            yield from _functions(node, f"{prefix}{node.name}.")
        else:
            yield from _functions(node, prefix)


def _noticed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what stands in the body of a function, without what nobody can notice and without inner functions."""
    children = node.body if isinstance(node, Function) else list(ast.iter_child_nodes(node))
    for child in children:
        if isinstance(child, Function | ast.ClassDef | ast.Raise | ast.Assert | ast.JoinedStr):
            continue
        if isinstance(child, ast.Expr) and (isinstance(child.value, ast.Constant) or _is_log(child.value)):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(node, ast.AnnAssign) and child is node.annotation:
            continue
        if isinstance(child, ast.Call) and re.search(r"(?:Error|Warning)$", ast.unparse(child.func)):
            continue
        yield child
        yield from _noticed(child)


def _is_log(node: ast.expr) -> bool:
    if isinstance(node, ast.Await):
        node = node.value
    if not isinstance(node, ast.Call):
        return False
    root = node.func
    while isinstance(root, ast.Attribute | ast.Call):
        if isinstance(root, ast.Attribute) and root.attr.lstrip("_") in LOGGERS:
            return True
        root = root.value if isinstance(root, ast.Attribute) else root.func
    return isinstance(root, ast.Name) and root.id.lstrip("_") in LOGGERS


def _of(node: ast.AST, text: _Text) -> Iterator[tuple[str, int, int, str]]:
    match node:
        case ast.Compare(ops=[op], left=left, comparators=[right]):
            start, end = text.span(left)[1], text.span(right)[0]
            for kind, table in (("comparison turned round", TURNED), ("bound moved by one", MOVED)):
                if type(op) in table:
                    (old, new), blanks = table[type(op)], r"\s+"
                    between = re.search(rf"(?<![\w<>=!]){old.replace(' ', blanks)}(?![\w=])", text.source[start:end])
                    if between:
                        yield kind, start + between.start(), start + between.end(), new
            yield from _one_more(right, text)
        case ast.BoolOp(op=op, values=[first, second, *_]):
            start, end = text.span(first)[1], text.span(second)[0]
            old, new = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
            if between := re.search(rf"\b{old}\b", text.source[start:end]):
                yield "and/or swapped", start + between.start(), start + between.end(), new
        case ast.UnaryOp(op=ast.Not()):
            start = text.span(node)[0]
            yield "not left out", start, start + len("not "), ""
        case ast.If(test=test) | ast.IfExp(test=test) if not any(isinstance(n, ast.NamedExpr) for n in ast.walk(test)):
            yield "condition always true", *text.span(test), "True"
            yield "condition always false", *text.span(test), "False"
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return value dropped", *text.span(value), "None"
        case ast.Expr(value=ast.Await(value=ast.Call())):
            yield "awaited statement left out", *text.span(node), "pass"
        case ast.Expr(value=ast.Call()):
            yield "call left out", *text.span(node), "pass"
        case ast.BinOp(op=ast.Add() | ast.Sub(), right=right):
            yield from _one_more(right, text)
            if isinstance(node.op, ast.Sub):
                start, end = text.span(node.left)[1], text.span(right)[0]
                sign = text.source.index("-", start, end)
                yield "minus to plus", sign, sign + 1, "+"
        case ast.Subscript(slice=ast.Constant() as index):
            yield from _one_more(index, text)
        case ast.Slice():
            for bound in (node.lower, node.upper):
                yield from _one_more(bound, text)
        case ast.Call(func=ast.Name(id=name) as called) if name in SWAPPED:
            yield "min/max, any/all swapped", *text.span(called), SWAPPED[name]
        case ast.Continue():
            yield "continue to break", *text.span(node), "break"


def _one_more(node: ast.AST | None, text: _Text) -> Iterator[tuple[str, int, int, str]]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield "off by one", *text.span(node), str(node.value + 1)
