"""Symbolic sizes: integers, and polynomials of unknown sizes in a canonical form.

Two expressions that are equal have equal values in every run; the reverse need not hold. `+`, `-`,
`*`, `//` and `%` of integers and expressions return either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from math import gcd
from typing import TypeAlias

#: Larger expressions are replaced by new unknowns, so that files cannot make them grow.
_MAX_TERMS = 32
_MAX_TEXT_CHARS = 2000
_MAX_COEFFICIENT = 1 << 62
_NUMBERS = count()


@dataclass(frozen=True, order=True)
class Atom:
    """An unknown, or a function of sizes that is no polynomial.

    Attributes:
        text: identity of the atom.
        function: name of the function; empty for an unknown.
        operands: arguments of the function.
        nonnegative: whether no run has a negative value.
    """

    text: str
    function: str = field(default="", compare=False)
    operands: tuple[Size, ...] = field(default=(), compare=False)
    nonnegative: bool = field(default=False, compare=False)


Monomial: TypeAlias = tuple[Atom, ...]


@dataclass(frozen=True)
class Expression:
    """A polynomial of atoms with integer coefficients.

    Attributes:
        terms: monomials with their coefficients, sorted, the constant term (monomial ()) first.
        is_size: whether the value is the size of an axis, and hence not negative.
    """

    terms: tuple[tuple[Monomial, int], ...]
    is_size: bool = field(default=False, compare=False)

    def __add__(self, other: Size) -> Size:
        if type(other) is int and other == 0:
            return self
        terms = dict(self.terms)
        for monomial, coefficient in _polynomial_terms(other):
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _simplify_polynomial(terms, is_nonnegative(self) and is_nonnegative(other))

    __radd__ = __add__

    def __neg__(self) -> Size:
        return _simplify_polynomial(
            {monomial: -coefficient for monomial, coefficient in self.terms}
        )

    def __sub__(self, other: Size) -> Size:
        return self + -other

    def __rsub__(self, other: Size) -> Size:
        return -self + other

    def __mul__(self, other: Size) -> Size:
        terms: dict[Monomial, int] = {}
        for lhs, first in self.terms:
            for rhs, second in _polynomial_terms(other):
                monomial = tuple(sorted(lhs + rhs))
                terms[monomial] = terms.get(monomial, 0) + first * second
        return _simplify_polynomial(terms, is_nonnegative(self) and is_nonnegative(other))

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        if isinstance(other, Expression):
            return _divide_by_expression(self, other)
        if other == 0:
            return _create_new_unknown()
        return _divide_by_integer(self, other) if other > 0 else _divide_by_integer(-self, -other)

    def __rfloordiv__(self, other: int) -> Size:
        return 0 if other == 0 else _divide_by_expression(other, self)

    def __mod__(self, other: Size) -> Size:
        return self - (self // other) * other

    def __rmod__(self, other: int) -> Size:
        return other - (other // self) * self

    def __str__(self) -> str:
        return " + ".join(
            "*".join([*([] if number == 1 and atoms else [str(number)]), *(a.text for a in atoms)])
            for atoms, number in self.terms
        )


Size: TypeAlias = int | Expression


def unknown_size(name: str, *, nonnegative: bool = True) -> Expression:
    """Return an unknown, equal to every other of the same name."""
    return Expression((((Atom(name, nonnegative=nonnegative),), 1),))


def mark_as_size(size: Size) -> Size:
    """Return an integer or expression marked as the size of an axis."""
    return replace(size, is_size=True) if isinstance(size, Expression) else size


def is_nonnegative(size: Size) -> bool:
    """Whether a value is certain not to be negative."""
    if isinstance(size, int):
        return size >= 0
    return size.is_size or all(
        coefficient >= 0 and all(atom.nonnegative for atom in monomial)
        for monomial, coefficient in size.terms
    )


def ceil_div(size: Size, divisor: int) -> Size:
    """Return a quotient rounded up; the divisor is positive."""
    return (size + divisor - 1) // divisor


def maximum(lhs: Size, rhs: Size) -> Size:
    """Return the greater of two values."""
    if is_nonnegative(lhs - rhs):
        return lhs
    if is_nonnegative(rhs - lhs):
        return rhs
    nonnegative = is_nonnegative(lhs) or is_nonnegative(rhs)
    return _apply_function("max", sorted((lhs, rhs), key=str), nonnegative=nonnegative)


def minimum(lhs: Size, rhs: Size) -> Size:
    """Return the smaller of two values."""
    if is_nonnegative(lhs - rhs):
        return rhs
    if is_nonnegative(rhs - lhs):
        return lhs
    nonnegative = is_nonnegative(lhs) and is_nonnegative(rhs)
    return _apply_function("min", sorted((lhs, rhs), key=str), nonnegative=nonnegative)


def broadcast_size(lhs: Size, rhs: Size) -> Size:
    """Return the size of an axis of two tensors combined elementwise.

    Raises:
        ValueError: the sizes are incompatible.
    """
    if lhs == rhs or rhs == 1:
        return lhs
    if lhs == 1:
        return rhs
    if isinstance(lhs, int) and isinstance(rhs, int):
        raise ValueError(f"sizes must be equal or 1, got {lhs} and {rhs}")
    if isinstance(lhs, int) or isinstance(rhs, int):
        return lhs if isinstance(lhs, int) else rhs
    operands = {*_broadcast_operands(lhs), *_broadcast_operands(rhs)}
    return _apply_function("broadcast", sorted(operands, key=str), nonnegative=True)


def _broadcast_operands(size: Expression) -> tuple[Size, ...]:
    """Return the operands of a size that is a broadcast, else the size itself."""
    atom = _match_single_atom(size.terms)
    return atom.operands if atom is not None and atom.function == "broadcast" else (size,)


def _match_single_atom(terms: Iterable[tuple[Monomial, int]]) -> Atom | None:
    monomials = list(terms)
    if len(monomials) == 1 and monomials[0][1] == 1 and len(monomials[0][0]) == 1:
        return monomials[0][0][0]
    return None


def _polynomial_terms(size: Size) -> tuple[tuple[Monomial, int], ...]:
    return size.terms if isinstance(size, Expression) else (((), size),)


def _simplify_polynomial(terms: Mapping[Monomial, int], is_size: bool = False) -> Size:
    nonzero = {monomial: number for monomial, number in terms.items() if number}
    if not nonzero:
        return 0
    if list(nonzero) == [()]:
        return nonzero[()]
    texts = sum(len(atom.text) for monomial in nonzero for atom in monomial)
    largest = max(map(abs, nonzero.values()))
    if len(nonzero) > _MAX_TERMS or texts > _MAX_TEXT_CHARS or largest > _MAX_COEFFICIENT:
        return _create_new_unknown()
    return Expression(tuple(sorted(nonzero.items())), is_size)


def _create_new_unknown() -> Expression:
    return unknown_size(f"#{next(_NUMBERS)}", nonnegative=False)


def _apply_function(name: str, operands: Iterable[Size], *, nonnegative: bool) -> Size:
    values = tuple(operands)
    text = f"{name}({', '.join(map(str, values))})"
    if len(text) > _MAX_TEXT_CHARS:
        return _create_new_unknown()
    return Expression((((Atom(text, name, values, nonnegative),), 1),))


def _divide_by_expression(dividend: Size, divisor: Expression) -> Size:
    """Return a floor quotient by an expression, exact if every term is a multiple."""
    if dividend == divisor:
        return 1
    exact = _compute_exact_quotient(dividend, divisor)
    if exact is not None:
        return exact
    nonnegative = is_nonnegative(dividend) and is_nonnegative(divisor)
    return _apply_function("quotient", (dividend, divisor), nonnegative=nonnegative)


def _compute_exact_quotient(dividend: Size, divisor: Expression) -> Size | None:
    if len(divisor.terms) != 1:
        return None
    ((factors, scale),) = divisor.terms
    terms: dict[Monomial, int] = {}
    for monomial, coefficient in _polynomial_terms(dividend):
        rest = list(monomial)
        for atom in factors:
            if atom not in rest:
                return None
            rest.remove(atom)
        if coefficient % scale:
            return None
        terms[tuple(rest)] = coefficient // scale
    return _simplify_polynomial(terms, is_nonnegative(dividend) and is_nonnegative(divisor))


def _divide_by_integer(dividend: Size, divisor: int) -> Size:
    """Return a floor quotient by a positive integer.

    Multiples of the divisor leave the quotient, and quotients of quotients become one:
    ⌊(⌊a / b⌋ + c) / d⌋ = ⌊(a + b·c) / (b·d)⌋.
    """
    if isinstance(dividend, int):
        return dividend // divisor
    if divisor == 1:
        return dividend
    if next(number for monomial, number in dividend.terms if monomial) < 0:
        return -_divide_by_integer(-dividend + divisor - 1, divisor)
    whole = _simplify_polynomial(
        {monomial: number // divisor for monomial, number in dividend.terms}
    )
    rest = {m: number % divisor for m, number in dividend.terms if number % divisor}
    constant = rest.pop((), 0)
    if not rest:
        return mark_as_size(whole) if is_nonnegative(dividend) else whole
    common = gcd(divisor, *rest.values())
    divisor, constant = divisor // common, constant // common
    rest = {monomial: number // common for monomial, number in rest.items()}
    atom = _match_single_atom(rest.items())
    if atom is not None and atom.function == "floor":
        inner, by = atom.operands
        assert isinstance(by, int)
        fraction = _divide_by_integer(inner + constant * by, divisor * by)
    else:
        numerator = _simplify_polynomial({**rest, (): constant})
        nonnegative = is_nonnegative(numerator)
        fraction = _apply_function("floor", (numerator, divisor), nonnegative=nonnegative)
    quotient = whole + fraction
    return mark_as_size(quotient) if is_nonnegative(dividend) else quotient
