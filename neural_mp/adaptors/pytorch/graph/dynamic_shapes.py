"""Inputs for which a captured graph is valid, checked before every run: sizes and numbers.

A graph holds the branches and numbers that the model's code derives from some sizes. torch.export
determines for which other sizes the graph is valid; these bounds are kept through rewrites and in
files. Inputs that are no tensors, such as Python numbers, are constants of the graph.

A branch such as `if height % 2 == 0` is a comparison of sizes in the guards of torch.export, which
no bound of a single axis states. A condition is a nested tuple such as `("==", ("%", "s0", 2), 0)`
of operators, integers and symbols of sizes, so that files hold no code.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from numbers import Number
from pathlib import Path
from typing import Any

import torch
from torch.export._tree_utils import reorder_kwargs
from torch.fx import GraphModule
from torch.fx._pytree import tree_flatten_spec
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import IntInfinity

from neural_mp.adaptors.pytorch.versions import is_being_traced, list_child_specs
from neural_mp.errors import CaptureError, DataError
from neural_mp.util.text import format_count
from neural_mp.util.validators import (
    boolean,
    invalid_value_error,
    list_of,
    non_negative_integer,
    optional,
    record,
    string,
    tuple_of,
    values_matching,
)

#: Key of `GraphModule.meta` for the sizes.
SIZES = "neural_mp_sizes"
#: Key of a constant input in files.
_VALUE = "value"
#: torch.export always specializes sizes 0 and 1, so a bound up to 2 means no bound.
_UNASKED = 2
#: Functions of torch.export for sizes that were rounded to a Python number.
_ROUNDED = frozenset({"TruncToInt", "CeilToInt", "FloorToInt", "RoundToInt"})
#: Number of sizes tried below and above the traced size, and CPU seconds for both: a long equation
#: takes long to evaluate, and without a try of every size, the bounds are narrower, but hold.
_MAX_SCANNED, MAX_SCAN_SECONDS = 4096, 10.0


@dataclass(frozen=True)
class Axis:
    """Valid sizes of one input axis.

    Attributes:
        symbol: axes with equal symbols have equal sizes; empty for an independent axis.
        least, largest: inclusive bounds; None for no bound.
        exported: whether the bounds are those of a program that the user exported.
        conditions: conditions on sizes of this axis and axes before.
    """

    symbol: str = ""
    least: int = 0
    largest: int | None = None
    exported: bool = False
    conditions: tuple[Expression, ...] = ()


@dataclass(frozen=True)
class Constant:
    """Value at capture of an input that is not a tensor, which the graph holds."""

    value: bool | int | float | str | None


#: Axes of each input, or its value; None for an input of a file that does not hold the value.
Sizes = tuple[tuple[Axis, ...] | Constant | None, ...]


def watch_sizes(module: GraphModule, sizes: Sizes) -> None:
    """Make a graph check its inputs for `sizes` only, instead of earlier checks."""
    module.meta[SIZES] = sizes
    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    module.register_forward_pre_hook(check_inputs, with_kwargs=True)


def collect_size_bounds(module: GraphModule) -> Sizes:
    """Return the size bounds that torch.export found for a module's inputs."""
    sizes: list[tuple[Axis, ...] | Constant | None] = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                sizes.append(tuple(_axis_from_size(module, size) for size in value.shape))
            else:
                is_plain = isinstance(value, bool | int | float | str | None)
                sizes.append(Constant(value) if is_plain else None)
    return _attach_conditions(tuple(sizes), module)


def _attach_conditions(sizes: Sizes, module: GraphModule) -> Sizes:
    """Add the conditions of the model's code, each to the last axis with a size in it."""
    symbols = {
        axis.symbol: (position, number)
        for position, axes in enumerate(sizes)
        if isinstance(axes, tuple)
        for number, axis in enumerate(axes)
        if axis.symbol
    }
    of_axis: dict[tuple[int, int], list[Expression]] = {}
    for condition in _iterate_graph_conditions(module):
        names = list_expression_symbols(condition)
        if names and names <= symbols.keys():
            of_axis.setdefault(max(symbols[symbol] for symbol in names), []).append(condition)
    return tuple(
        tuple(
            replace(axis, conditions=tuple(of_axis.get((position, number), ())))
            for number, axis in enumerate(axes)
        )
        if isinstance(axes, tuple)
        else axes
        for position, axes in enumerate(sizes)
    )


def _iterate_graph_conditions(module: GraphModule) -> list[Expression]:
    for node in module.graph.nodes:
        value = node.meta.get("val") if node.op == "placeholder" else None
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                return collect_size_conditions(size.node.shape_env)
    return []


def _axis_from_size(module: GraphModule, size: int | torch.SymInt) -> Axis:
    if not isinstance(size, torch.SymInt) or size.node.maybe_as_int() is not None:
        return Axis("", int(size), int(size))
    expression = size.node.expr
    bounds = module.range_constraints.get(expression)
    if bounds is None:
        return Axis()
    least = int(bounds.lower)
    largest = None if isinstance(bounds.upper, IntInfinity) else int(bounds.upper)
    least = 0 if least <= _UNASKED else least
    lowest, highest = _range_of_number(size)
    if highest is not None:
        least, largest = max(least, lowest), min(highest, largest or highest)
    return Axis(str(expression), least, largest)


def _range_of_number(size: torch.SymInt) -> tuple[int, int | None]:
    """Return the least and the largest size for which numbers computed from a size are as traced.

    `int(size * 0.5)` returns a Python number, which the graph holds; torch.export keeps the
    equation in its guards alone. The largest size is None without such a number.
    """
    hint, symbol = size.node.hint, size.node.expr
    guards = (guard.expr for guard in size.node.shape_env.guards)
    own = (guard for guard in guards if guard.free_symbols == {symbol} and guard.is_Equality)
    equations = [e for e in own if any(type(side).__name__ in _ROUNDED for side in e.args)]

    def is_as_traced(value: int) -> bool:
        return all(bool(equation.subs({symbol: value})) for equation in equations)

    if not equations or hint is None or not is_as_traced(hint):
        return 0, None
    end = time.thread_time() + MAX_SCAN_SECONDS
    lowest = highest = hint
    for distance in range(1, _MAX_SCANNED + 1):
        reaches_down = lowest == hint - distance + 1 and lowest > 0
        reaches_up = highest == hint + distance - 1
        if time.thread_time() > end or not (reaches_down or reaches_up):
            break
        lowest -= reaches_down and is_as_traced(lowest - 1)
        highest += reaches_up and is_as_traced(highest + 1)
    return lowest, highest


def check_inputs(
    module: GraphModule, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> None:
    """Check the input sizes and constant inputs of a graph.

    Raises:
        DataError: if an axis is too short or too long, two axes that must agree differ, an input
            that is not a tensor has another value than at capture, or inputs are nested otherwise.
    """
    if is_being_traced():
        return
    symbol_sizes: dict[str, int] = {}
    leaves = _flatten_as_captured(module, args, kwargs)
    for position, (leaf, axes) in enumerate(zip(leaves, module.meta[SIZES], strict=False)):
        if isinstance(axes, Constant):
            if isinstance(leaf, torch.Tensor) or not bool(leaf == axes.value):
                raise DataError(_describe_other_value(position, axes, leaf))
            continue
        if axes is None or not isinstance(leaf, torch.Tensor):
            if axes or (axes is not None and not pytree.tree_is_leaf(leaf)):
                shown = repr(leaf) if isinstance(leaf, Number) else f"a {type(leaf).__name__}"
                raise DataError(f"input {position} must be a tensor, as at capture, got {shown}")
            continue
        if leaf.ndim != len(axes):
            raise DataError(
                f"input {position} must have {format_count(len(axes), 'axis', 'axes')}, as at "
                f"capture, got {leaf.ndim}"
            )
        for number, (size, axis) in enumerate(zip(leaf.shape, axes, strict=True)):
            expected = _describe_mismatch(size, axis, symbol_sizes)
            if expected:
                if axis.exported:
                    open_axis = how_to_export_open(number)
                    expected += f", as in the exported program; for a dynamic axis, {open_axis}"
                raise DataError(
                    f"axis {number} of input {position} has {format_count(size, 'value')}; "
                    f"{expected}"
                )
            for condition in axis.conditions:
                if not condition_holds(condition, symbol_sizes):
                    raise DataError(
                        _describe_other_path(module.meta[SIZES], position, number, condition)
                    )


def _describe_other_path(sizes: Sizes, position: int, number: int, condition: Expression) -> str:
    names: dict[str, str] = {}
    for index, axes in enumerate(sizes):
        for count, axis in enumerate(axes if isinstance(axes, tuple) else ()):
            names.setdefault(axis.symbol, f"the size of axis {count} of input {index}")
    text = _format_expression(condition, names)
    text = text[1:-1] if text.startswith("(") else text
    return (
        f"axis {number} of input {position} must have a size of the captured path of the model's "
        f"code: {text}; for other sizes, convert the model once "
        f"more, with inputs of such a size"
    )


def _describe_other_value(position: int, constant: Constant, leaf: object) -> str:
    shown = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
    return (
        f"input {position} must be {constant.value!r}, as at capture, got {shown}: torch.export "
        f"keeps an input that is not a tensor as a constant; convert the model once for each "
        f"value, or let its forward take a tensor"
    )


def _describe_mismatch(size: int, axis: Axis, symbol_sizes: dict[str, int]) -> str:
    if axis.least == axis.largest and size != axis.least:
        return f"expected {axis.least}"
    if size < axis.least:
        return f"expected at least {axis.least}"
    if axis.largest is not None and size > axis.largest:
        return f"expected at most {axis.largest}"
    if axis.symbol and symbol_sizes.setdefault(axis.symbol, size) != size:
        return f"expected {symbol_sizes[axis.symbol]}, the size of another axis"
    return ""


def how_to_export_open(axis: int = 0, parameter: str = "x") -> str:
    """Return instructions for exporting a program with a dynamic axis."""
    name = "batch" if axis == 0 else "size"
    return (
        f"export the model with torch.export.export(…, dynamic_shapes="
        f"{{{parameter!r}: {{{axis}: torch.export.Dim({name!r})}}}})"
    )


def map_axes(sizes: Sizes, change: Callable[[Axis], Axis]) -> Sizes:
    """Apply `change` to every axis of the inputs."""
    return tuple(tuple(map(change, axes)) if isinstance(axes, tuple) else axes for axes in sizes)


def list_flat_inputs(
    module: GraphModule, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Any]:
    """Return the values of a call in the argument order of a graph."""
    spec = module.graph._codegen.pytree_info.in_spec
    ordered = reorder_kwargs(dict(kwargs), spec) if kwargs else {}
    return list(pytree.tree_leaves((tuple(args), ordered)))


def _flatten_as_captured(
    module: GraphModule, args: Sequence[object], kwargs: Mapping[str, object]
) -> list[Any]:
    """Return the values of a call that the code of a graph reads; a tensor may be a container.

    Raises:
        DataError: the values are nested otherwise than at capture.
    """
    spec = module.graph._codegen.pytree_info.in_spec
    positional, named = list_child_specs(spec)
    count = positional.num_children
    # Keywords of the capture may be given by position.
    values = {**dict(zip(named.context, args[count:], strict=False)), **kwargs}
    try:
        return list(tree_flatten_spec((tuple(args[:count]), values), spec))
    except KeyError as error:
        raise DataError(f"a dict of inputs must have the key {error}, as at capture") from None
    except (AttributeError, IndexError, RuntimeError, TypeError):
        raise DataError("inputs must be nested in tuples, lists and dicts as at capture") from None


def input_keywords(module: GraphModule) -> tuple[str, ...]:
    """Return the keyword names of a graph's inputs."""
    _, named = list_child_specs(module.graph._codegen.pytree_info.in_spec)
    return tuple(named.context)


def find_fixed_axes(
    module: GraphModule, args: Sequence[object], kwargs: Mapping[str, object], sizes: Sizes
) -> dict[int, set[int]]:
    """Return id of an input of a call → its axes with one valid size."""
    leaves = list_flat_inputs(module, args, kwargs)
    return {
        id(leaf): {number for number, axis in enumerate(axes) if axis.least == axis.largest}
        for leaf, axes in zip(leaves, sizes, strict=True)
        if isinstance(axes, tuple)
    }


def with_fixed_axes(sizes: Sizes, leaves: Sequence[Any], first: int) -> Sizes:
    """Return sizes with the axes from `first` on fixed to those of `list_flat_inputs`."""
    return tuple(
        tuple(
            replace(axis, least=leaf.shape[number], largest=leaf.shape[number])
            if number >= first
            else axis
            for number, axis in enumerate(axes)
        )
        if isinstance(axes, tuple)
        else axes
        for leaf, axes in zip(leaves, sizes, strict=True)
    )


def to_plain(sizes: Sizes) -> list[Any]:
    """Convert to nested lists and dicts for JSON."""
    plain: list[Any] = []
    for axes in sizes:
        if isinstance(axes, Constant):
            plain.append({_VALUE: axes.value})
        else:
            plain.append(None if axes is None else [list(astuple(axis)) for axis in axes])
    return plain


def from_plain(data: object) -> Sizes:
    """Read the output of `to_plain`.

    Raises:
        NeuralMPError: if the data does not match the schema.
    """
    return list_of(optional(_parse_stored_input))(data)


def _parse_stored_input(value: object) -> tuple[Axis, ...] | Constant:
    if isinstance(value, dict):
        return Constant(record({_VALUE: _CONSTANT})(value)[_VALUE])
    return list_of(_parse_stored_axis)(value)


_CONSTANT = values_matching(
    "a number, a text or null", lambda value: isinstance(value, bool | int | float | str | None)
)


def _parse_stored_axis(value: object) -> Axis:
    if isinstance(value, list) and len(value) == len(_EARLIER):
        return Axis(*tuple_of(*_EARLIER)(value))
    if isinstance(value, list) and len(value) == len(_EARLIER) + 1:
        return Axis(*tuple_of(*_EARLIER, boolean)(value))
    return Axis(*tuple_of(*_EARLIER, boolean, list_of(condition_from_plain))(value))


#: Axis schema of earlier versions, without the flag `exported` and conditions.
_EARLIER = (string, non_negative_integer, optional(non_negative_integer))


#: Integer, symbol of a size, or operator with its operands.
Expression = int | str | tuple[Any, ...]

#: Largest nesting of an expression in a file.
_MAX_DEPTH = 32
#: Operators on any number of operands.
_ON_ALL: Mapping[str, Callable[[Sequence[int]], int]] = {
    **{"+": sum, "*": math.prod, "max": max, "min": min, "and": all, "or": any}
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
#: Numbers, sizes and operators of a condition, counted where they are written: sizes computed from
#: each other share parts, so that a condition may be exponentially longer than its computation.
MAX_CONDITION_PARTS = 1000
#: Largest exponent that is written as a product.
_MAX_EXPONENT = 8
#: Folder of torch, the folder of its tracer of Python code, and that of this package.
_TORCH = Path(torch.__file__).parent
_TRACER = _TORCH / "_dynamo"
_THIS_PACKAGE = Path(__file__).parents[2]


def collect_size_conditions(shape_env: Any) -> list[Expression]:
    """Return the conditions that the model's own code puts on sizes.

    Conditions of torch's ops are left out: most only distinguish memory layouts.

    Raises:
        CaptureError: a condition is too long or too deep for a check before every run.
    """
    conditions: list[Expression] = []
    for guard in shape_env.guards:
        if _is_of_model(guard):
            condition = _convert_short(shape_env.replace(guard.expr))
            if isinstance(condition, tuple) and condition not in conditions:
                conditions.append(condition)
    return conditions


def _convert_short(symbolic: Any) -> Expression | None:
    """Convert a condition as `_convert_expression`.

    Raises:
        CaptureError: the condition is too long or too deep.
    """
    parts = [symbolic]
    for part in parts:
        if len(parts) <= MAX_CONDITION_PARTS:
            parts += part.args
    if len(parts) <= MAX_CONDITION_PARTS:
        condition = _convert_expression(symbolic)
        if _measure_expression_depth(condition) <= _MAX_DEPTH:
            return condition
    raise CaptureError(
        f"a condition of the model's code on sizes must have at most {MAX_CONDITION_PARTS} parts "
        f"and {_MAX_DEPTH} levels, got more; give inputs of fixed sizes, or export the program "
        f"with fewer dynamic axes"
    )


def _measure_expression_depth(expression: Expression | None) -> int:
    return (
        1 + max(map(_measure_expression_depth, expression[1:]))
        if isinstance(expression, tuple)
        else 0
    )


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
        if not isinstance(exponent, int) or not 0 < exponent <= _MAX_EXPONENT:
            return None
        return ("*", *[base] * exponent)
    name = _OPERATORS.get(type(symbolic).__name__)
    return None if name is None else (name, *operands)


def condition_holds(condition: Expression, sizes: Mapping[str, int]) -> bool:
    """Whether a condition holds for symbol → size; not if a symbol has no size."""
    try:
        return bool(_evaluate_expression(condition, sizes))
    except (KeyError, ZeroDivisionError):
        return False


def _evaluate_expression(expression: Expression, sizes: Mapping[str, int]) -> int:
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return sizes[expression]
    name, *operands = expression
    values = [_evaluate_expression(operand, sizes) for operand in operands]
    if name == _NOT:
        return not values[0]
    return _ON_ALL[name](values) if name in _ON_ALL else _ON_TWO[name](*values)


def list_expression_symbols(expression: Expression) -> set[str]:
    """Return the symbols of the sizes in an expression."""
    if isinstance(expression, tuple):
        return set[str]().union(*map(list_expression_symbols, expression[1:]))
    return {expression} if isinstance(expression, str) else set()


def _format_expression(expression: Expression, names: Mapping[str, str]) -> str:
    if isinstance(expression, str):
        return names.get(expression, expression)
    if isinstance(expression, int):
        return str(expression)
    name, *operands = expression
    parts = [_format_expression(operand, names) for operand in operands]
    if name == _NOT:
        return f"(not {parts[0]})"
    if name in ("max", "min"):
        return f"{name}({', '.join(parts)})"
    return f"({f' {name} '.join(parts)})"


def condition_from_plain(value: object, depth: int = 0) -> Expression:
    """Read an expression from nested lists.

    Raises:
        NeuralMPError: if the value is not an expression of sizes.
    """
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if not isinstance(value, list) or depth > _MAX_DEPTH or not _is_operation(value):
        raise invalid_value_error("an operator on sizes with its operands", value)
    return (value[0], *(condition_from_plain(part, depth + 1) for part in value[1:]))


def _is_operation(parts: list[Any]) -> bool:
    name, operands = parts[0] if parts else None, len(parts) - 1
    if not isinstance(name, str):
        return False
    if name in _ON_ALL:
        return operands > 0
    return operands == (1 if name == _NOT else 2) and (name == _NOT or name in _ON_TWO)
