"""Values of symbolic sizes, computed with Python's integers."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.adaptors.common.symbolic_sizes import Size

_FUNCTIONS = {
    "max": max,
    "min": min,
    "broadcast": max,
    "floor": lambda one, other: one // other,
    "quotient": lambda one, other: one // other,
}


def value_of(size: Size, unknowns: Mapping[str, int]) -> int:
    """The value of a size; KeyError for an unknown without a value."""
    if isinstance(size, int):
        return size
    total = 0
    for atoms, number in size.terms:
        product = number
        for atom in atoms:
            operands = (value_of(operand, unknowns) for operand in atom.operands)
            product *= (
                _FUNCTIONS[atom.function](*operands) if atom.function else unknowns[atom.text]
            )
        total += product
    return total
