"""Conditions on input sizes under which the model's code takes the captured path.

A branch such as `if height % 2 == 0` is a comparison of sizes in the guards of torch.export, which
no bound of a single axis states. A condition is a nested tuple such as `("==", ("%", "s0", 2), 0)`
of operators, integers and symbols of sizes, so that files hold no code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from neural_mp.util.validators import invalid

#: Integer, symbol of a size, or operator with its operands.
Expression = int | str | tuple[Any, ...]

#: Largest nesting of an expression in a file.
_MAX_DEPTH = 32
#: Operators on any number of operands.
_ON_ALL: Mapping[str, Callable[[Sequence[int]], int]] = {
    **{"+": sum, "*": math.prod, "max": max, "min": min, "and": all, "or": any},
}
#: Operators on two operands.
_ON_TWO: Mapping[str, Callable[[int, int], int]] = {
    **{"%": operator.mod, "//": operator.floordiv, "==": operator.eq, "!=": operator.ne},
    **{"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge},
}
_NOT = "not"
#: Class of torch's symbolic expressions → operator.
_OPERATORS = {
    **{"Add": "+", "Mul": "*", "Max": "max", "Min": "min", "And": "and", "Or": "or", "Not": _NOT},
    **{"Mod": "%", "PythonMod": "%", "FloorDiv": "//", "CleanDiv": "//"},
    **{"Equality": "==", "Unequality": "!=", "StrictLessThan": "<", "LessThan": "<="},
    **{"StrictGreaterThan": ">", "GreaterThan": ">="},
}
#: Largest exponent that is written as a product.
_MAX_EXPONENT = 8
#: Folder of torch, the folder of its tracer of Python code, and that of this package.
_TORCH = Path(torch.__file__).parent
_TRACER = _TORCH / "_dynamo"
_THIS_PACKAGE = Path(__file__).parents[2]


def conditions_of(shape_env: Any) -> list[Expression]:
    """Return the conditions that the model's own code puts on sizes.

    Conditions of torch's ops are left out: most only distinguish memory layouts.
    """
    conditions: list[Expression] = []
    for guard in shape_env.guards:
        if _is_of_model(guard):
            condition = _convert_expression(shape_env.replace(guard.expr))
            if isinstance(condition, tuple) and condition not in conditions:
                conditions.append(condition)
    return conditions


def _is_of_model(guard: Any) -> bool:
    location = getattr(getattr(guard, "sloc", None), "framework_loc", None)
    if location is None:
        return False
    path = Path(location.filename)
    if path.is_relative_to(_TRACER):
        return True
    return not path.is_relative_to(_TORCH) and not path.is_relative_to(_THIS_PACKAGE)


def _convert_expression(symbolic: Any) -> Expression | None:
    """Convert from torch's symbolic form; None if an operator is not among those of conditions."""
    if symbolic.is_Integer:
        return int(symbolic)
    if symbolic.is_Symbol:
        return str(symbolic)
    operands = [_convert_expression(part) for part in symbolic.args]
    if not operands or any(part is None for part in operands):
        return None
    if symbolic.is_Pow:
        base, exponent = operands
        is_product = isinstance(exponent, int) and 0 < exponent <= _MAX_EXPONENT
        return ("*", *[base] * exponent) if isinstance(exponent, int) and is_product else None
    name = _OPERATORS.get(type(symbolic).__name__)
    return None if name is None else (name, *operands)


def holds(condition: Expression, sizes: Mapping[str, int]) -> bool:
    """Whether a condition holds for symbol → size; not if a symbol has no size."""
    try:
        return bool(_value_of(condition, sizes))
    except (KeyError, ZeroDivisionError):
        return False


def _value_of(expression: Expression, sizes: Mapping[str, int]) -> int:
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return sizes[expression]
    name, *operands = expression
    values = [_value_of(operand, sizes) for operand in operands]
    if name == _NOT:
        return not values[0]
    return _ON_ALL[name](values) if name in _ON_ALL else _ON_TWO[name](*values)


def symbols_of(expression: Expression) -> set[str]:
    """Return the symbols of the sizes in an expression."""
    return set(_iterate_symbols(expression))


def _iterate_symbols(expression: Expression) -> Iterator[str]:
    if isinstance(expression, str):
        yield expression
    elif isinstance(expression, tuple):
        for operand in expression[1:]:
            yield from _iterate_symbols(operand)


def in_words(expression: Expression, names: Mapping[str, str]) -> str:
    """Write an expression in Python's operators, with names for its symbols."""
    text = _format_expression(expression, names)
    return text[1:-1] if text.startswith("(") else text


def _format_expression(expression: Expression, names: Mapping[str, str]) -> str:
    if isinstance(expression, int | str):
        return str(names.get(expression, expression) if isinstance(expression, str) else expression)
    name, *operands = expression
    parts = [_format_expression(operand, names) for operand in operands]
    if name == _NOT:
        return f"(not {parts[0]})"
    return (
        f"{name}({', '.join(parts)})"
        if name.isalpha() and name not in ("and", "or")
        else (f"({f' {name} '.join(parts)})")
    )


def condition_from_plain(value: object, depth: int = 0) -> Expression:
    """Read an expression from nested lists.

    Raises:
        NeuralMPError: if the value is not an expression of sizes.
    """
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if not isinstance(value, list) or depth > _MAX_DEPTH or not _is_operation(value):
        raise invalid("an operator on sizes with its operands", value)
    return (value[0], *(condition_from_plain(part, depth + 1) for part in value[1:]))


def _is_operation(parts: list[Any]) -> bool:
    name, operands = parts[0] if parts else None, len(parts) - 1
    if not isinstance(name, str):
        return False
    if name in _ON_ALL:
        return operands > 0
    return operands == (1 if name == _NOT else 2) and (name == _NOT or name in _ON_TWO)
