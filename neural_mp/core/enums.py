"""Words that are choices: each a string, of which only a few are known."""

from __future__ import annotations

from collections.abc import Iterable

from neural_mp.util.string_enum import StringEnum


class QuantDType(StringEnum):
    """The type that the numbers of a quantized tensor are stored in."""

    INT8 = "int8"
    UINT8 = "uint8"


class Scheme(StringEnum):
    """Whether zero is stored as 0, or as what suits the range."""

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


class Granularity(StringEnum):
    """Whether every channel has a scale of its own."""

    PER_CHANNEL = "per_channel"
    PER_TENSOR = "per_tensor"


class CalibrationAlgorithm(StringEnum):
    """What chooses the range of a tensor.

    The first four choose it from what calibration saw, best known first; with `dynamic` it is the
    range of the values at hand, found anew on every run.
    """

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    KL = "kl"
    MSE = "mse"
    DYNAMIC = "dynamic"


class WeightRange(StringEnum):
    """How much of int8 a weight uses: ±127, or ±63 (see `neural_mp.core.int8_accumulation`)."""

    FULL = "full_range"
    REDUCED = "reduced_range"


class Approach(StringEnum):
    """The ways of INT8: ranges fixed by calibration, found on every run, or of weights only."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    WEIGHT_ONLY = "weight_only"


class Capture(StringEnum):
    """How the graph of a model may be found: of the whole model, or module by module."""

    WHOLE = "whole"
    MODULES = "modules"


class RuleSet(StringEnum):
    """The rules by which the four lists decide: ours, or those of TensorFlow's own pass."""

    ADVANCED = "advanced"
    STOCK = "stock"


class Objective(StringEnum):
    """What a run makes small: time, memory while it runs, or the size of weights."""

    PERFORMANCE = "performance"
    FOOTPRINT = "footprint"
    MODELSIZE = "modelsize"


class Dialect(StringEnum):
    """Whose words a tuning file is written in: ours, or those of Intel Neural Compressor."""

    OWN = "own"
    INC = "inc"


def is_latency_only(objectives: Iterable[Objective]) -> bool:
    """Whether nothing but time is to be made small."""
    return set(objectives) == {Objective.PERFORMANCE}
