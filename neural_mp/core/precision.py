"""Precisions of ops, and quantization of tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.core.enums import Approach, CalibrationAlgorithm, WeightRange
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError, UnknownPrecisionError, did_you_mean
from neural_mp.util.string_enum import StringEnum


class Precision(StringEnum):
    """Precision of an op; equal to its name: `plan[op].precision == "int8"`.

    The precision that an op computes in; INT2 to INT4 are the storage of a weight, which the op
    expands to floats. INT16, with weights of 4 to 16 bits, is for accelerators only.
    """

    INT2 = "int2"
    INT3 = "int3"
    INT4 = "int4"
    INT8 = "int8"
    INT16 = "int16"
    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"

    @property
    def bits(self) -> int:
        """Bits per value."""
        return int(self.value.lstrip("bfintp"))

    @property
    def is_16_bit(self) -> bool:
        """Whether the precision is BF16 or FP16."""
        return self.bits == 16 and not self.is_integer

    @property
    def is_integer(self) -> bool:
        """Whether the precision is INT16 or of fewer bits."""
        return self.value.startswith("int")

    @property
    def is_low_bit(self) -> bool:
        """Whether the precision is INT2 to INT4: weights in groups, inputs in float."""
        return self.bits < 8


class Precisions(tuple[Precision, ...]):
    """Several precisions; also equal to a list of their names: `precisions == ["bf16", "fp32"]`."""

    __slots__ = ()
    __hash__ = tuple.__hash__

    def __eq__(self, other: object) -> bool:
        return tuple.__eq__(self, tuple(other) if isinstance(other, list) else other)

    def __ne__(self, other: object) -> bool:
        return not self == other


def format_precision_name(precisions: Iterable[str]) -> str:
    """Return the precisions of a model as one name, such as `FP16` or `BF16/FP32`."""
    return "/".join(str(precision).upper() for precision in precisions)


def parse_precisions(value: str | Precision | Iterable[str | Precision]) -> Precisions:
    """Parse `"int8,bf16"`, `["int8", "bf16"]`, `"fp16"` or `Precision.BF16`.

    Returns:
        The precisions without duplicates, fewest bits first, BF16 before FP16.

    Raises:
        UnknownPrecisionError: a precision does not exist, or none was given.
    """
    if isinstance(value, Precision):
        return Precisions((value,))
    if not isinstance(value, str) and not isinstance(value, Iterable):
        raise UnknownPrecisionError(
            f"precisions must be a string, e.g. 'int8,bf16', or a list of strings, "
            f"got {value!r} of type {type(value).__name__}"
        )
    names: list[Any] = value.split(",") if isinstance(value, str) else list(value)
    precisions = set()
    for item in names:
        name = str(item).strip().lower()
        if name not in set(Precision):
            raise UnknownPrecisionError(
                f"precision {name!r} does not exist{_suggest_precisions(name)}"
            )
        precisions.add(Precision(name))
    if not precisions:
        raise UnknownPrecisionError(
            "precisions must contain at least one precision, got none; set e.g. 'int8,bf16'"
        )
    return Precisions(precision for precision in Precision if precision in precisions)


def _suggest_precisions(name: str) -> str:
    parts = name.replace(";", " ").split()
    if len(parts) > 1:
        return f"; separate precisions by commas, e.g. {','.join(parts)!r}"
    if name in _DTYPES:
        return f"; did you mean {_DTYPES[name]!r}?"
    return did_you_mean(name, Precision)


#: Names that frameworks give to the precisions.
_DTYPES = {
    "float": "fp32",
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "qint8": "int8",
    "uint8": "int8",
    "qint4": "int4",
}

#: Precisions with kernels on CPUs.
CPU_PRECISIONS = tuple(p for p in Precision if p is not Precision.INT16)
#: Bits of a weight → the precision of its op on CPUs.
INTEGERS = {precision.bits: precision for precision in CPU_PRECISIONS if precision.is_integer}
#: Precisions of weights below 8 bits.
LOW_BITS = tuple(precision for precision in Precision if precision.is_low_bit)
#: Corrections of an INT8 layer, alternatives to its fallback; each changes weights before rounding
#: and keeps the FP32 function.
CORRECTIONS: Mapping[str, str] = {
    "equalize": "channels scaled between this layer and the previous one, by their weights",
    "smooth": "channels scaled between this layer and the previous op, by activations and weights",
    "bias_correction": "mean error of rounding the weight, subtracted from the bias",
    "adaround": "each weight rounded up or down, learned from the FP32 results of the layer",
    "learned_scale": "scale of each channel of the weight, learned from the FP32 results",
}
#: The corrections that learn a weight from calibration samples, layer by layer.
RECONSTRUCTIONS = ("adaround", "learned_scale")
#: The corrections that rescale channels.
RESCALING = ("equalize", "smooth")

#: Kernels of an FP32 op besides the framework's own; each rounds as FP32 does, in another order.
FLOAT_KERNELS: Mapping[str, str] = {"onednn": "oneDNN, with the weight packed for its kernel"}


@dataclass(frozen=True)
class OpConfig:
    """Precision and quantization of one op.

    Attributes:
        precision: compute precision.
        weight: for INT2 to INT16, quantization of the weight.
        activation: for INT8 and INT16, quantization of the inputs; None with a `weight` leaves the
            inputs in float. INT8 with neither selects the op's best configuration.
        corrections: for INT8, names in `CORRECTIONS`, in their order; for INT16, `bias_correction`.
        kernel: for FP32, a name in `FLOAT_KERNELS`; empty for the framework's own kernel.
    """

    precision: Precision
    weight: QuantSpec | None = None
    activation: QuantSpec | None = None
    corrections: tuple[str, ...] = ()
    kernel: str = ""

    def __post_init__(self) -> None:
        self._check_kernel()
        for name in self.corrections:
            if name not in CORRECTIONS:
                raise PlanError(
                    f"correction {name!r} does not exist{did_you_mean(name, CORRECTIONS)}"
                )
        if self.activation is not None and self.activation.range is not WeightRange.FULL:
            raise PlanError(
                f"the range of an activation must be {WeightRange.FULL}, got "
                f"{self.activation.range}; reduced ranges apply to weights only"
            )
        self._check_bits()
        if {"equalize", "smooth"} <= set(self.corrections):
            raise PlanError(
                "corrections 'equalize' and 'smooth' exclude each other, since both scale the same "
                "channels; remove one of them"
            )
        self._check_reconstruction()
        is_wide = self.precision is Precision.INT16 and self.corrections == ("bias_correction",)
        if self.corrections and self.precision is not Precision.INT8 and not is_wide:
            raise PlanError(
                f"correction {self.corrections[0]!r} requires precision int8, got "
                f"{self.precision}; remove the correction or set the op to int8"
            )
        object.__setattr__(
            self, "corrections", tuple(n for n in CORRECTIONS if n in self.corrections)
        )

    def _check_reconstruction(self) -> None:
        if not self.is_reconstructed:
            return
        name = next(name for name in RECONSTRUCTIONS if name in self.corrections)
        grouped = self.weight is not None and self.weight.group_size is not None
        if grouped or self.precision.is_low_bit:
            raise PlanError(
                f"correction {name!r} is for weights with a scale per channel or tensor; to learn "
                f"the rounding of a weight in groups, add 'autoround' to its quantization"
            )

    def _check_bits(self) -> None:
        bits = self.weight.dtype.bits if self.weight is not None else self.precision.bits
        allowed = (4, 8, 16) if self.precision is Precision.INT16 else (self.precision.bits,)
        if self.precision.is_integer and bits not in allowed:
            raise PlanError(
                f"the weight of an op in {self.precision} must have "
                f"{' or '.join(map(str, allowed))} bits, got {bits}"
            )
        width = 16 if self.precision is Precision.INT16 else 8
        if self.activation is not None and self.activation.dtype.bits != width:
            raise PlanError(
                f"an activation of an op in {self.precision} must have {width} bits, got "
                f"{self.activation.dtype}"
            )
        is_float = self.weight is not None and self.weight.dtype.is_float
        if self.activation is not None and (is_float or self.activation.dtype.is_float):
            raise PlanError("weights in a float format are stored alone; remove the activation")
        if self.activation is not None and self.activation.group_size is not None:
            raise PlanError("per_group is for weights only; set the activation to per_tensor")
        if self.precision.is_low_bit and self.weight is not None and not self.weight.group_size:
            raise PlanError(
                f"granularity of a weight in {self.precision} must be per_group, got "
                f"{self.weight.granularity}, which only {Precision.INT16} takes, for accelerators"
            )
        if self.precision.is_low_bit and self.activation is not None:
            raise PlanError(f"an op in {self.precision} computes in float; remove its activation")

    def _check_kernel(self) -> None:
        if not self.kernel:
            return
        if self.kernel not in FLOAT_KERNELS:
            raise PlanError(
                f"kernel {self.kernel!r} does not exist{did_you_mean(self.kernel, FLOAT_KERNELS)}"
            )
        if self.precision is not Precision.FP32:
            raise PlanError(
                f"kernel {self.kernel!r} requires precision fp32, got {self.precision}; remove the "
                f"kernel or set the op to fp32"
            )

    @property
    def needs_data(self) -> bool:
        """Whether the weight is corrected with calibration data."""
        return self.is_reconstructed or (self.weight is not None and self.weight.needs_data)

    @property
    def is_reconstructed(self) -> bool:
        """Whether the weight is learned from the results of the layer."""
        return any(name in RECONSTRUCTIONS for name in self.corrections)

    @property
    def rescales(self) -> bool:
        """Whether channels between the layer and the previous one are rescaled."""
        return any(name in RESCALING for name in self.corrections)

    @property
    def approach(self) -> Approach | None:
        """Approach to quantization; None for floats."""
        if self.precision.is_low_bit:
            return Approach.WEIGHT_ONLY
        if self.precision not in (Precision.INT8, Precision.INT16):
            return None
        if self.activation is not None:
            dynamic = self.activation.algorithm is CalibrationAlgorithm.DYNAMIC
            return Approach.DYNAMIC if dynamic else Approach.STATIC
        return Approach.STATIC if self.weight is None else Approach.WEIGHT_ONLY

    def __str__(self) -> str:
        parts = [*self.corrections, *([self.kernel] if self.kernel else [])]
        if self.activation is not None:
            parts.insert(0, self.activation.algorithm)
        elif self.weight is not None:
            parts = ["weight only", *self.weight.corrections, *parts]
        return f"{self.precision} ({', '.join(parts)})" if parts else str(self.precision)


FP32 = OpConfig(Precision.FP32)


def make_weight_only(weight: QuantSpec) -> OpConfig:
    """Return the config of an op whose weight is stored in integers and whose inputs are float."""
    return OpConfig(INTEGERS[weight.dtype.bits], weight)
