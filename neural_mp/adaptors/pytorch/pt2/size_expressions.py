"""Symbolic size expressions of programs in files: parsed from text and rewritten.

PyTorch evaluates any such text as Python. Here the text is parsed into the few constructs that
`torch.export.save` writes, and PyTorch gets an expression rendered from these.
"""

from __future__ import annotations

import ast
import math
import re

from neural_mp.io import limits

_SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,6}")
_FLOAT_TEXT = re.compile(r"-?\d{1,400}(\.\d{0,400})?(e[+-]?\d{1,3})?")
_OF_SYMPY = (
    "Abs Add And Ceiling Eq Equality ExprCondPair Ge GreaterThan Gt Le LessThan Lt Max Min Mul Ne"
    " Not Or Piecewise StrictGreaterThan StrictLessThan Unequality Xor ceiling floor sign"
)
_OF_TORCH = (
    "CeilDiv CeilToInt CleanDiv FloatTrueDiv FloorDiv FloorToInt Identity IntTrueDiv Mod"
    " IsNonOverlappingAndDenseIndicator ModularIndexing PythonMod RoundDecimal RoundToInt ToFloat"
    " TruncToFloat TruncToInt Where"
)
#: Without `exp`, `sinh` and `cosh`: rounding their results needs as many digits as their argument.
_UNARY = "sqrt cos sin tan tanh asin acos atan log asinh log2"
_FUNCTIONS = frozenset(
    {*_OF_SYMPY.split(), *_OF_TORCH.split(), *(f"OpaqueUnaryFn_{name}" for name in _UNARY.split())}
)
#: Functions that grow quickly: the second argument must be a small constant.
_POWERS = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift", "RShift"})
#: Functions that sympy simplifies by comparing all their arguments with each other.
_COMPARING = frozenset({"Max", "Min", "Piecewise"})
_CONSTANTS = frozenset({"true", "false", "True", "False", "oo", "int_oo"})
_ASSUMPTIONS = frozenset(
    {"positive", "integer", "nonnegative", "real", "nonzero", "negative", "finite"}
)
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.USub: "-",
    ast.UAdd: "+",
    ast.Invert: "~",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


def render_expression(text: str) -> str:
    """Return a size expression, rewritten from its parsed form.

    Raises:
        ValueError: if the text is not such an expression, or exceeds the size limits.
    """
    if (
        len(text) > limits.MAX_EXPRESSION_CHARS
        or _measure_nesting_depth(text) > limits.MAX_DEPTH
        or not text.isascii()
    ):
        raise ValueError(f"{text[:100]!r} is too long, or not an expression of sizes")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        result = _render_tree(tree.body, 1, 0)
        _count_terms(tree.body)
        return result
    except (SyntaxError, RecursionError, MemoryError, _NotOneError) as error:
        raise ValueError(f"{text[:100]!r} is not an expression of sizes") from error


class _NotOneError(Exception):
    """Raised for a construct that no size expression contains."""


def _measure_nesting_depth(text: str) -> int:
    deepest = depth = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return max(deepest, text.count("**"), len(re.findall(r"[-+~][-+~ ]*[-+~]", text)))


def _render_tree(tree: ast.AST, power: int, level: int) -> str:
    """Render a subexpression; `power` is the product of the enclosing exponents."""
    if level > 2 * limits.MAX_DEPTH:
        raise _NotOneError
    match tree:
        case ast.Constant(value=bool() as flag):
            return str(flag)
        case ast.Constant(value=int() as number):
            return _format_integer(number)
        case ast.Constant(value=float() as real) if math.isfinite(real):
            return repr(real)
        case ast.Name(id=name) if _SYMBOL.fullmatch(name) or name in _CONSTANTS:
            return name
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return f"({_OPERATORS[type(op)]}{_render_tree(operand, power, level + 1)})"
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return f"({' ** '.join(_render_power(left, right, power, level))})"
        case (
            ast.BinOp(left=left, op=op, right=right)
            | ast.Compare(left=left, ops=[op], comparators=[right])
        ) if type(op) in _OPERATORS:
            sides = (_render_tree(side, power, level + 1) for side in (left, right))
            return f"({f' {_OPERATORS[type(op)]} '.join(sides)})"
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _render_call(name, args, keywords, power, level + 1)
    raise _NotOneError


def _render_call(
    name: str, args: list[ast.expr], keywords: list[ast.keyword], power: int, level: int
) -> str:
    if name == "Symbol":
        return _render_symbol(args, keywords)
    if name == "Float":
        return _render_float(args, keywords)
    if keywords or not args:
        raise _NotOneError
    if name in _POWERS and len(args) == 2:
        return f"{name}({', '.join(_render_power(args[0], args[1], power, level))})"
    if name in {"Integer", "Rational"}:
        return f"{name}({', '.join(map(_render_integer, args))})"
    if name not in _FUNCTIONS:
        raise _NotOneError
    return f"{name}({', '.join(_render_tree(arg, power, level) for arg in args)})"


def _render_symbol(args: list[ast.expr], keywords: list[ast.keyword]) -> str:
    match args:
        case [ast.Constant(value=str() as name)] if _SYMBOL.fullmatch(name):
            pass
        case _:
            raise _NotOneError
    parts = [repr(name)]
    for keyword in keywords:
        match keyword:
            case ast.keyword(arg=str() as option, value=ast.Constant(value=bool() as flag)) if (
                option in _ASSUMPTIONS
            ):
                parts.append(f"{option}={flag}")
            case _:
                raise _NotOneError
    return f"Symbol({', '.join(parts)})"


def _render_float(args: list[ast.expr], keywords: list[ast.keyword]) -> str:
    match args, keywords:
        case (
            [ast.Constant(value=str() as text)],
            [ast.keyword(arg="precision", value=ast.Constant(value=53))],
        ) if _FLOAT_TEXT.fullmatch(text):
            return f"Float({text!r}, precision=53)"
    raise _NotOneError


def _render_power(base: ast.expr, exponent: ast.expr, power: int, level: int) -> tuple[str, str]:
    number = _parse_constant_value(exponent)
    if number is None or power * max(abs(number), 1) > limits.MAX_EXPRESSION_EXPONENT:
        raise _NotOneError
    raised = _render_tree(base, int(power * max(abs(number), 1)), level + 1)
    return raised, _render_tree(exponent, 1, level + 1)


def _parse_constant_value(tree: ast.expr) -> float | None:
    """Return the value of a number in any notation; None for other expressions."""
    match tree:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            below = _parse_constant_value(operand)
            return None if below is None else -below
        case ast.Call(func=ast.Name(id="Integer"), args=[argument], keywords=[]):
            return _parse_constant_value(argument)
        case ast.Call(func=ast.Name(id="Rational"), args=[dividend, divisor], keywords=[]):
            parts = _parse_constant_value(dividend), _parse_constant_value(divisor)
            return None if not parts[0] or not parts[1] else parts[0] / parts[1]
    return None


def _render_integer(tree: ast.expr) -> str:
    number = _parse_constant_value(tree)
    if not isinstance(number, int):
        raise _NotOneError
    return _format_integer(number)


def _format_integer(number: int) -> str:
    if abs(number) > limits.MAX_PROGRAM_INTEGER:
        raise _NotOneError
    return str(number)


def _count_terms(tree: ast.AST) -> int:
    """Return the number of terms of an expression after expansion."""
    count = 1
    match tree:
        case ast.UnaryOp(operand=operand):
            count = _count_terms(operand)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            count = _count_call_terms("Pow", [left, right])
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            count = _count_call_terms("Add", [left, right])
        case ast.BinOp(left=left, right=right):
            count = _count_call_terms("Mul", [left, right])
        case ast.Compare(left=left, comparators=[right]):
            count = _count_call_terms("Add", [left, right])
        case ast.Call(func=ast.Name(id=name), args=args):
            count = _count_call_terms(name, args)
    if count > limits.MAX_EXPRESSION_TERMS:
        raise _NotOneError
    return count


def _count_call_terms(name: str, args: list[ast.expr]) -> int:
    """Return the number of terms of a function, or of the equivalent operator."""
    counts = [_count_terms(arg) for arg in args]
    if name in _COMPARING and sum(map(_count_compared, args)) > limits.MAX_EXPRESSION_COMPARED:
        raise _NotOneError
    match name:
        case "Add" | "Identity":
            return sum(counts)
        case "Mul":
            return math.prod(counts)
        case "Pow":
            exponent = math.ceil(abs(_parse_constant_value(args[1]) or 0))
            return math.comb(counts[0] + exponent - 1, exponent)
    return 1


def _count_compared(tree: ast.expr) -> int:
    """Return the number of values that an argument contributes to a comparing function."""
    match tree:
        case ast.Call(func=ast.Name(id=name), args=args) if name in _COMPARING:
            return sum(map(_count_compared, args))
    return 1
