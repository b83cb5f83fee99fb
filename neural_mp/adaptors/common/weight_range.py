"""Integer weights that are right only where products of bytes are exact."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from neural_mp.adaptors.common.integer_encoding import Array, is_wide
from neural_mp.core.int8_accumulation import EXACT_EVERYWHERE, KernelKind

L = TypeVar("L")


@dataclass(frozen=True)
class IntegerWeight(Generic[L]):
    """A weight in int8 that an integer kernel multiplies by.

    Attributes:
        layer: what reads it, as the framework has it.
        kernel: the kind of the kernel.
        integers: the weight.
    """

    layer: L
    kernel: KernelKind
    integers: Array


def wide_kinds(weights: Iterable[IntegerWeight[L]]) -> frozenset[KernelKind]:
    """The kinds of kernel that have a weight beyond ±63."""
    return frozenset(weight.kernel for weight in weights if is_wide(weight.integers))


def saturating(weights: Iterable[IntegerWeight[L]]) -> list[L]:
    """The layers with such a weight, of the kinds that are not exact on every processor."""
    found = (weight for weight in weights if weight.kernel not in EXACT_EVERYWHERE)
    return [weight.layer for weight in found if is_wide(weight.integers)]
