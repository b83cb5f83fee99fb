"""Quantizations of weights in groups that adaptors offer, in the order of preference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from neural_mp.core.enums import Granularity, KernelInputs, QuantDType, Scheme
from neural_mp.core.quant_spec import QuantSpec

#: Group sizes in the order of preference: the first is common to all kernels, the smallest and
#: fastest, the last the most accurate.
GROUP_SIZES = (128, 64, 32)


def group_spec(
    bits: int,
    size: int,
    inputs: KernelInputs = KernelInputs.FLOAT,
    scheme: Scheme = Scheme.ASYMMETRIC,
) -> QuantSpec:
    """Return the quantization of a weight in groups of a size; symmetric weights are signed."""
    sign = "" if scheme is Scheme.SYMMETRIC else "u"
    dtype = QuantDType(f"{sign}int{bits}")
    return QuantSpec(dtype, scheme, Granularity.PER_GROUP, group_size=size, inputs=inputs)


def input_group(spec: QuantSpec, inputs: int) -> int:
    """Return the number of consecutive inputs that a kernel rounds to INT8 with one scale.

    The group of the weight, or for one scale per output, the largest of `GROUP_SIZES` that divides
    the inputs, otherwise the smallest.
    """
    fitting = (size for size in GROUP_SIZES if inputs % size == 0)
    return spec.group_size or next(fitting, min(GROUP_SIZES))


def fitting_specs(
    inputs: int, bits: Iterable[int] = (4,), scheme: Scheme = Scheme.ASYMMETRIC
) -> tuple[QuantSpec, ...]:
    """Return the quantizations whose group size divides the inputs, best first."""
    return tuple(
        group_spec(width, size, scheme=scheme)
        for width in bits
        for size in GROUP_SIZES
        if inputs % size == 0
    )


def product_specs(inputs: KernelInputs, fewer_bits: Iterable[int] = ()) -> Iterator[QuantSpec]:
    """Yield the quantizations of products: 4 bits, the fastest scheme first, 8 bits, fewer bits."""
    for scheme in (Scheme.SYMMETRIC, Scheme.ASYMMETRIC):
        for size in GROUP_SIZES:
            yield group_spec(4, size, inputs, scheme)
    for bits in (8, *fewer_bits):
        for size in GROUP_SIZES:
            yield group_spec(bits, size, inputs)
