"""Configurations of torchao: those of its names here, and objects of torchao itself.

Only class names and attributes are read, so that torchao need not be installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from neural_mp.api.by_rules import Conversion, converted_by_rules
from neural_mp.core.enums import Approach, Capture, Scheme
from neural_mp.core.precision import INTEGERS, Precision
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.space import FP32_ONLY, ConversionRules, OpConstraint, QuantConstraint

_DENSE = frozenset({"Linear", "Conv1D"})


@dataclass(frozen=True)
class Int4WeightOnlyConfig:
    """Weights in 4 bits, with a scale and an offset for each group of inputs.

    Attributes:
        group_size: inputs per group.
        int4_choose_qparams_algorithm: `tinygemm` rounds to nearest, `hqq` moves the offsets.
    """

    group_size: int = 128
    int4_choose_qparams_algorithm: str = "tinygemm"


@dataclass(frozen=True)
class Int8WeightOnlyConfig:
    """Weights in INT8, with a scale per output.

    Attributes:
        group_size: must be None: the kernel has one scale per output.
    """

    group_size: int | None = None


@dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig:
    """INT8 with ranges of inputs computed on every run."""


@dataclass(frozen=True)
class IntxWeightOnlyConfig:
    """Weights in 2 to 8 bits.

    Attributes:
        weight_dtype: `torch.int4`, or a text such as `int4`.
        granularity: an object with `group_size`, or None for groups of 32.
        mapping_type: an enumeration's member, or a text: `symmetric` or `asymmetric`.
    """

    weight_dtype: Any = "int8"
    granularity: Any = None
    mapping_type: Any = "symmetric"


def quantize_(
    model: Any, config: object, filter_fn: Callable[[Any, str], bool] | None = None
) -> None:
    """Quantize the dense layers of a module in place, without calibration.

    Args:
        model: the module; its dense layers are replaced.
        config: a configuration of torchao, or one of this module.
        filter_fn: layer, name → whether the layer is quantized; default: all.

    Raises:
        ConfigurationError: the configuration is unknown.
        CaptureError: the module runs no dense layer.
    """
    limit = constraint_of(config)
    if limit is None:
        raise ConfigurationError(
            f"config must be a configuration of torchao, got {type(config).__name__}"
            f"{did_you_mean(type(config).__name__, _KINDS)}"
        )
    excluded = [] if filter_fn is None else list(_left_out(model, filter_fn))
    rules = ConversionRules(
        ((_DENSE, limit),), by_name={f"{re.escape(name)}$": FP32_ONLY for name in excluded}
    )
    result = converted_by_rules(model, Conversion(rules, capture=Capture.LAYERS))
    for op, chosen in result.plan.items():
        if chosen.precision is not Precision.FP32:
            model.set_submodule(op, result.model.get_submodule(op))


def _left_out(model: Any, filter_fn: Callable[[Any, str], bool]) -> Iterator[str]:
    for name, module in model.named_modules():
        if type(module).__name__ in _DENSE and not filter_fn(module, name):
            yield name


def constraint_of(config: object) -> OpConstraint | None:
    """Return the constraint that a configuration means; None if it is not of torchao.

    Raises:
        ConfigurationError: a value of the configuration is not supported.
    """
    # TorchAoConfig of transformers holds a configuration of torchao, or its name.
    inner = getattr(config, "quant_type", None)
    if type(config).__name__ == "TorchAoConfig" and inner is not None:
        return constraint_of(inner)
    parser = _KINDS.get(type(config).__name__)
    return None if parser is None else parser(config)


def _int4(config: Any) -> OpConstraint:
    hqq = "hqq" in str(getattr(config, "int4_choose_qparams_algorithm", "")).lower()
    return grouped_limit(
        Precision.INT4, config.group_size, Scheme.ASYMMETRIC, "hqq" if hqq else "rtn"
    )


def _int8(config: Any) -> OpConstraint:
    if config.group_size is not None:
        raise ConfigurationError(
            f"group_size of Int8WeightOnlyConfig must be None, got {config.group_size!r}: weights "
            f"in INT8 have one scale per output; leave it out"
        )
    return OpConstraint((Precision.INT8,), approaches=(Approach.WEIGHT_ONLY,))


def _dynamic(config: Any) -> OpConstraint:
    return OpConstraint((Precision.INT8,), approaches=(Approach.DYNAMIC,))


def _intx(config: Any) -> OpConstraint:
    dtype = str(config.weight_dtype).removeprefix("torch.")
    bits = dtype.removeprefix("int")
    if not bits.isdecimal() or int(bits) not in INTEGERS:
        raise ConfigurationError(
            f"weight_dtype of IntxWeightOnlyConfig must be int2, int3, int4 or int8, got {dtype!r}"
        )
    mapping = str(getattr(config.mapping_type, "name", config.mapping_type)).lower()
    scheme = Scheme.SYMMETRIC if mapping.startswith("symmetric") else Scheme.ASYMMETRIC
    if int(bits) == 8:
        return OpConstraint((Precision.INT8,), approaches=(Approach.WEIGHT_ONLY,))
    size = getattr(config.granularity, "group_size", 32)
    return grouped_limit(INTEGERS[int(bits)], size, scheme, "rtn")


def grouped_limit(
    precision: Precision, size: int | None, scheme: Scheme, rounding: str
) -> OpConstraint:
    """Return the constraint of weights in groups; a size of None allows any."""
    return OpConstraint(
        (precision,),
        QuantConstraint(
            scheme=(scheme,),
            group_size=None if size is None else (size,),
            rounding=(rounding,),
        ),
        approaches=(Approach.WEIGHT_ONLY,),
        # Below 4 bits, all weights are asymmetric; groups must divide the inputs.
        is_lenient=True,
    )


_KINDS: dict[str, Callable[[Any], OpConstraint]] = {
    "Int4WeightOnlyConfig": _int4,
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _dynamic,
    "IntxWeightOnlyConfig": _intx,
}
