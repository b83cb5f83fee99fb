"""Enumerations of string options."""

from __future__ import annotations

from collections.abc import Iterable

from neural_mp.util.string_enum import StringEnum


class QuantDType(StringEnum):
    """Storage type of a quantized tensor."""

    INT8 = "int8"
    UINT8 = "uint8"
    INT16 = "int16"
    UINT16 = "uint16"
    INT4 = "int4"
    UINT4 = "uint4"
    INT3 = "int3"
    UINT3 = "uint3"
    INT2 = "int2"
    UINT2 = "uint2"
    FP8_E4M3 = "fp8_e4m3"
    MXFP4 = "mxfp4"

    @property
    def is_float(self) -> bool:
        """Whether values are floats, of weights only."""
        return self in (QuantDType.FP8_E4M3, QuantDType.MXFP4)

    @property
    def bits(self) -> int:
        """Bits per value."""
        if self.is_float:
            return 8 if self is QuantDType.FP8_E4M3 else 4
        return int(self.value.removeprefix("u").removeprefix("int"))


class Scheme(StringEnum):
    """Quantization scheme: zero point fixed at 0, or chosen to fit the range."""

    SYMMETRIC = "symmetric"
    ASYMMETRIC = "asymmetric"


class Granularity(StringEnum):
    """Granularity of scales: per channel, per tensor, or per group of consecutive inputs."""

    PER_CHANNEL = "per_channel"
    PER_TENSOR = "per_tensor"
    PER_GROUP = "per_group"


class CalibrationAlgorithm(StringEnum):
    """Algorithm that chooses the range of a tensor.

    The first four choose the range from calibration data, most common first; `dynamic` computes the
    range of the current values on every run.
    """

    MINMAX = "minmax"
    PERCENTILE = "percentile"
    KL = "kl"
    MSE = "mse"
    DYNAMIC = "dynamic"


class WeightCorrection(StringEnum):
    """Correction of a weight in 4 bits or less, in the order of application.

    `awq` scales inputs by their magnitudes, `gptq` compensates each rounding error in the weights
    not rounded yet, `hqq` moves the offsets, without data, `autoround` learns the roundings from
    the outputs of decoder blocks.
    """

    AWQ = "awq"
    GPTQ = "gptq"
    HQQ = "hqq"
    AUTOROUND = "autoround"

    @property
    def needs_data(self) -> bool:
        """Whether the correction requires calibration data."""
        return self is not WeightCorrection.HQQ


class WeightRange(StringEnum):
    """int8 range of a weight: ±127, or ±63 (see `neural_mp.core.int8_accumulation`)."""

    FULL = "full_range"
    REDUCED = "reduced_range"


class KernelInputs(StringEnum):
    """Inputs of a kernel that reads a weight as stored: float, or rounded to INT8.

    Rounded by the kernel on every run, symmetric, with one scale for each row and group.
    """

    FLOAT = "float_inputs"
    INT8 = "int8_inputs"


class Approach(StringEnum):
    """Approaches to quantization: calibrated ranges, ranges of every run, or weights only."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    WEIGHT_ONLY = "weight_only"


#: Values of the option `runtime` besides the names of runtimes.
SOURCE_RUNTIME, AUTO_RUNTIME = "source", "auto"
#: PyTorch through its compiler, as a value of `runtime`.
COMPILED_RUNTIME = "torch.compile"

#: Values of the option `io`.
FLOAT_IO, INT8_IO = "float", "int8"
#: Values of the option `kv_cache`.
FLOAT_CACHE, INT8_CACHE = "float", "int8"


class Capture(StringEnum):
    """Graph capture: of the whole model, module by module, or layer by layer."""

    WHOLE = "whole"
    MODULES = "modules"
    LAYERS = "layers"


class RuleSet(StringEnum):
    """Rules of graph painting: of this package, or of TensorFlow's own pass."""

    ADVANCED = "advanced"
    STOCK = "stock"


class Objective(StringEnum):
    """Quantity to minimize: seconds per batch, memory footprint, or size of the weights."""

    PERFORMANCE = "performance"
    FOOTPRINT = "footprint"
    MODELSIZE = "modelsize"
    TARGET = "target"  #: estimated cost on an accelerator


class ObjectiveName(StringEnum):
    """Name of an objective in options; `performance` is latency."""

    LATENCY = "latency"
    PERFORMANCE = "performance"
    THROUGHPUT = "throughput"
    FOOTPRINT = "footprint"
    MODELSIZE = "modelsize"

    @property
    def objective(self) -> Objective:
        """The quantity to minimize: seconds per batch for latency and for throughput."""
        is_time = self in (ObjectiveName.LATENCY, ObjectiveName.THROUGHPUT)
        return Objective.PERFORMANCE if is_time else Objective(self.value)


class Dialect(StringEnum):
    """Vocabulary of a tuning file: native, or that of Intel Neural Compressor."""

    OWN = "own"
    INC = "inc"


def is_latency_only(objectives: Iterable[Objective]) -> bool:
    """Whether latency is the only objective."""
    return set(objectives) == {Objective.PERFORMANCE}


class Tracker(StringEnum):
    """Experiment tracker that stores tunings."""

    MLFLOW = "mlflow"
    WANDB = "wandb"
    TENSORBOARD = "tensorboard"
