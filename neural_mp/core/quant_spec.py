"""Quantization of one tensor: `QuantSpec` and its words in plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from neural_mp.core.enums import (
    CalibrationAlgorithm,
    Granularity,
    KernelInputs,
    QuantDType,
    Scheme,
    WeightCorrection,
    WeightRange,
)
from neural_mp.errors import PlanError, did_you_mean
from neural_mp.util.string_enum import StringEnum

#: Algorithms that choose a range from calibration data, most common first.
RANGE_ALGORITHMS = tuple(a for a in CalibrationAlgorithm if a is not CalibrationAlgorithm.DYNAMIC)

_WORDS: Mapping[str, type[StringEnum]] = {
    "dtype": QuantDType,
    "scheme": Scheme,
    "granularity": Granularity,
    "algorithm": CalibrationAlgorithm,
    "range": WeightRange,
    "inputs": KernelInputs,
}
#: Fields that plans write only if they differ from the default, and users do not constrain.
_DEFAULTS: Mapping[str, StringEnum] = {"range": WeightRange.FULL, "inputs": KernelInputs.FLOAT}
#: Values of the `QuantSpec` fields that users may constrain, most common first.
QUANT_CHOICES: Mapping[str, tuple[str, ...]] = {
    **{name: tuple(words) for name, words in _WORDS.items() if name not in _DEFAULTS},
    "dtype": tuple(dtype for dtype in QuantDType if dtype.bits <= 8 and not dtype.is_float),
}


#: The word for a weight without corrections: rounded to nearest.
ROUND_TO_NEAREST = "rtn"
#: All roundings of a weight in groups, as texts.
ROUNDINGS = (
    ROUND_TO_NEAREST,
    "hqq",
    "awq",
    "gptq",
    "awq gptq",
    "autoround",
    "awq autoround",
    "gptq autoround",
    "awq gptq autoround",
)
#: Default number of steps per block of learned rounding, and the largest number.
ROUNDING_STEPS, MAX_ROUNDING_STEPS = 200, 100_000
#: Upper bound of a group size; larger than the inputs of any layer in use.
MAX_GROUP_SIZE = 1 << 20
#: Inputs that share a scale in MXFP4.
MX_BLOCK = 32

#: Float format of a weight → its only quantization, as a text.
FLOAT_SPECS: Mapping[QuantDType, str] = {
    QuantDType.FP8_E4M3: "fp8_e4m3 symmetric per_channel minmax",
    QuantDType.MXFP4: f"mxfp4 symmetric per_group {MX_BLOCK} minmax",
}


@dataclass(frozen=True)
class QuantSpec:
    """Quantization of one tensor.

    Attributes:
        dtype: `int8` or `uint8`; for accelerators, also of 16 bits; for a weight, also of 2 to 4
            bits, e.g. `uint4`, or `fp8_e4m3` and `mxfp4`.
        scheme: `symmetric` (zero point fixed) or `asymmetric`.
        granularity: `per_tensor` or `per_channel`; for a weight also `per_group`, which 2 to 4
            bits require, except for `int4` weights of accelerators.
        algorithm: range selection: `minmax`, `percentile`, `kl` or `mse` from calibration data,
            `dynamic` from the current values on every run.
        range: for a weight, `full_range` (±127) or `reduced_range` (±63), which stays exact with
            saturating accumulation.
        group_size: for `per_group`, the number of consecutive inputs that share a scale.
        corrections: for `per_group`, the corrections of the weight: none (`rtn`), `awq`, `gptq`,
            both, or `hqq`; all but `hqq` also with `autoround`.
        inputs: for a weight that is stored alone, `per_group` or `per_channel`, `float_inputs`, or
            `int8_inputs` if the kernel rounds its inputs.
    """

    dtype: QuantDType
    scheme: Scheme
    granularity: Granularity
    algorithm: CalibrationAlgorithm = CalibrationAlgorithm.MINMAX
    range: WeightRange = WeightRange.FULL
    group_size: int | None = None
    corrections: tuple[WeightCorrection, ...] = ()
    inputs: KernelInputs = KernelInputs.FLOAT

    def __post_init__(self) -> None:
        for name, kind in _WORDS.items():
            value = kind.parse(getattr(self, name), f"{name} of a quantized tensor", PlanError)
            object.__setattr__(self, name, value)
        if self.range is not WeightRange.FULL and self.dtype is not QuantDType.INT8:
            raise PlanError(
                f"range {self.range} requires dtype int8, got {self.dtype}; set dtype to int8 or "
                f"remove the range"
            )
        self._check_groups()
        self._check_float_format()

    def _check_groups(self) -> None:
        in_groups = self.granularity is Granularity.PER_GROUP
        is_int4 = self.dtype is QuantDType.INT4 and self.granularity is Granularity.PER_CHANNEL
        if not in_groups and self.dtype.bits < 8 and not is_int4:
            raise PlanError(
                f"granularity of {self.dtype} must be per_group, got {self.granularity}"
            )
        if self.granularity is Granularity.PER_TENSOR and self.inputs is not KernelInputs.FLOAT:
            raise PlanError(
                f"{self.inputs} requires granularity per_group or per_channel, got per_tensor"
            )
        size = self.group_size
        if in_groups and (size is None or not 1 <= size <= MAX_GROUP_SIZE):
            raise PlanError(
                f"per_group requires a group size from 1 to {MAX_GROUP_SIZE}, got {size}; write "
                f"e.g. 'uint4 asymmetric per_group 128'"
            )
        if size is not None and not in_groups:
            raise PlanError(f"group size {size} requires granularity per_group; remove the size")
        self._check_corrections(in_groups)

    def _check_corrections(self, in_groups: bool) -> None:
        parsed = {
            WeightCorrection.parse(name, "correction of a weight", PlanError)
            for name in self.corrections
        }
        if parsed and not in_groups:
            raise PlanError(
                f"corrections {' '.join(sorted(parsed))!r} require granularity per_group; remove "
                f"the corrections"
            )
        ordered = tuple(name for name in WeightCorrection if name in parsed)
        if WeightCorrection.HQQ in parsed and len(parsed) > 1:
            raise PlanError("correction hqq excludes other corrections; remove the others")
        object.__setattr__(self, "corrections", ordered)

    def _check_float_format(self) -> None:
        if not self.dtype.is_float:
            return
        only = FLOAT_SPECS[self.dtype]
        if str(self) != only:
            raise PlanError(
                f"a weight in {self.dtype} must be {only!r}, got {str(self)!r}; no CPU computes "
                f"in this type, and corrections are for integers"
            )

    @property
    def uncorrected(self) -> QuantSpec:
        """The same grid without corrections."""
        return replace(self, corrections=()) if self.corrections else self

    @property
    def rounding(self) -> str:
        """The corrections as one text; `rtn` for none."""
        return " ".join(self.corrections) or ROUND_TO_NEAREST

    @property
    def unlearned(self) -> QuantSpec:
        """The same quantization without learned rounding, which starts from its result."""
        remaining = (name for name in self.corrections if name is not WeightCorrection.AUTOROUND)
        return replace(self, corrections=tuple(remaining))

    @property
    def is_learned(self) -> bool:
        """Whether the rounding is learned."""
        return WeightCorrection.AUTOROUND in self.corrections

    @property
    def needs_data(self) -> bool:
        """Whether the weight is rounded with calibration data."""
        return any(correction.needs_data for correction in self.corrections)

    def __str__(self) -> str:
        fields = (self.dtype, self.scheme, self.granularity, self.group_size, self.algorithm)
        parts = [str(value) for value in (*fields, *self.corrections) if value is not None]
        attributes = (getattr(self, name) for name in _DEFAULTS)
        parts += (attribute for attribute in attributes if attribute not in _DEFAULTS.values())
        return " ".join(parts)

    @classmethod
    def parse(cls, text: str) -> QuantSpec:
        """Read back `str(spec)`, words in any order: `"uint8 asymmetric per_tensor kl"`.

        A number is the group size: `"uint4 asymmetric per_group 128 minmax"`. Corrections follow,
        or `rtn` for none: `"uint4 asymmetric per_group 128 awq gptq"`.

        Raises:
            PlanError: a word is unknown, a field is given twice, or a required field is missing.
        """
        values: dict[str, Any] = {}
        tokens = str(text).split()
        corrections = [token for token in tokens if token in (*WeightCorrection, ROUND_TO_NEAREST)]
        if len(corrections) > 1 and ROUND_TO_NEAREST in corrections:
            raise PlanError(
                f"{ROUND_TO_NEAREST} in {text!r} excludes corrections; remove one of them"
            )
        for token in (token for token in tokens if token not in corrections):
            is_size = token.isdecimal() and len(token) <= len(str(MAX_GROUP_SIZE))
            name = next((n for n, kind in _WORDS.items() if token in set(kind)), None)
            name = "group_size" if is_size else name
            if name is None:
                valid = [w.value for kinds in _WORDS.values() for w in kinds]
                valid += [*WeightCorrection, ROUND_TO_NEAREST]
                raise PlanError(
                    f"{token!r} in the quantization {text!r} is not a valid term"
                    f"{did_you_mean(token, valid)}"
                )
            if name in values:
                raise PlanError(
                    f"{text!r} must contain one {name}, got {values[name]!r} and {token!r}"
                )
            values[name] = int(token) if is_size else token
        missing = [name for name in ("dtype", "scheme", "granularity") if name not in values]
        if missing:
            raise PlanError(
                f"{text!r} must contain a {missing[0]}; add one of "
                f"{', '.join(QUANT_CHOICES[missing[0]])}"
            )
        named = (token for token in corrections if token != ROUND_TO_NEAREST)
        return cls(**values, corrections=tuple(map(WeightCorrection, named)))
