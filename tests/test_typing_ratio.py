"""Share of the package's parameters with a type other than `Any`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "neural_mp"
#: The share of parameters that may be anything at all.
MOST = 0.08


def annotations(source: str) -> Iterator[ast.expr]:
    """Yield the annotations of all function parameters, without `self` and `cls`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            several = (arguments.vararg, arguments.kwarg)
            for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *several):
                if arg and arg.annotation and arg.arg not in ("self", "cls"):
                    yield arg.annotation


def is_any(annotation: ast.expr) -> bool:
    """Whether it is `Any`, also beside others (`Any | None`), but not inside (`list[Any]`)."""
    if isinstance(annotation, ast.BinOp):
        return is_any(annotation.left) or is_any(annotation.right)
    return ast.unparse(annotation) in ("Any", "typing.Any")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a: Any, b: int): ...", [True, False]),
        ("def f(a: Any | None, *b: Any, **c: Any): ...", [True, True, True]),
        ("def f(a: list[Any], /, *, b: 'object'): ...", [False, False]),
        ("class A:\n async def f(self: Any, a: typing.Any): ...", [True]),
        ("def f(a, b=1): ...", []),
    ],
)
def test_parameters_are_told_apart(source, expected):
    assert list(map(is_any, annotations(source))) == expected


def test_few_parameters_are_any():
    flags = [
        is_any(annotation)
        for file in PACKAGE.rglob("*.py")
        for annotation in annotations(file.read_text())
    ]
    assert len(flags) > 1000
    assert sum(flags) / len(flags) <= MOST
