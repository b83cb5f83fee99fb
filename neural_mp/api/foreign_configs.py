"""Quantization configurations of torchao and `transformers`.

Only class names and attributes are read, so that neither has to be installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neural_mp.api.replay import Conversion, convert_by_rules
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
    limit = _parse_torchao_config(config)
    if limit is None:
        raise ConfigurationError(
            f"config must be a configuration of torchao, got {type(config).__name__}"
            f"{did_you_mean(type(config).__name__, _KINDS)}"
        )
    excluded: list[str] = []
    if filter_fn is not None:
        excluded = [
            name
            for name, module in model.named_modules()
            if type(module).__name__ in _DENSE and not filter_fn(module, name)
        ]
    rules = ConversionRules(
        ((_DENSE, limit),), by_name={f"{re.escape(name)}$": FP32_ONLY for name in excluded}
    )
    result = convert_by_rules(model, Conversion(rules, capture=Capture.LAYERS))
    for op, chosen in result.plan.items():
        if chosen.precision is not Precision.FP32:
            model.set_submodule(op, result.model.get_submodule(op))


def parse_foreign_config(config: object) -> OpConstraint | None:
    """Return the constraint that a configuration means; None if it is of neither tool.

    Raises:
        ConfigurationError: a value of the configuration, or its tool, is not supported.
    """
    return _parse_torchao_config(config) or _parse_transformers_config(config)


def _parse_torchao_config(config: object) -> OpConstraint | None:
    # TorchAoConfig of transformers holds a configuration of torchao, or its name.
    inner = getattr(config, "quant_type", None)
    if type(config).__name__ == "TorchAoConfig" and inner is not None:
        return _parse_torchao_config(inner)
    parser = _KINDS.get(type(config).__name__)
    return None if parser is None else parser(config)


def _parse_int4_config(config: Int4WeightOnlyConfig) -> OpConstraint:
    hqq = "hqq" in str(getattr(config, "int4_choose_qparams_algorithm", "")).lower()
    return make_grouped_limit(
        Precision.INT4, config.group_size, Scheme.ASYMMETRIC, "hqq" if hqq else "rtn"
    )


def _parse_int8_config(config: Int8WeightOnlyConfig) -> OpConstraint:
    if config.group_size is not None:
        raise ConfigurationError(
            f"group_size of Int8WeightOnlyConfig must be None, got {config.group_size!r}: weights "
            f"in INT8 have one scale per output; leave it out"
        )
    return OpConstraint((Precision.INT8,), approaches=(Approach.WEIGHT_ONLY,))


def _parse_intx_config(config: IntxWeightOnlyConfig) -> OpConstraint:
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
    return make_grouped_limit(INTEGERS[int(bits)], size, scheme, "rtn")


def make_grouped_limit(
    precision: Precision, size: int | None, scheme: Scheme, rounding: str
) -> OpConstraint:
    """Return the constraint of weights in groups; a size of None allows any."""
    return OpConstraint(
        (precision,),
        QuantConstraint(
            scheme=(scheme,), group_size=None if size is None else (size,), rounding=(rounding,)
        ),
        approaches=(Approach.WEIGHT_ONLY,),
        # Below 4 bits, all weights are asymmetric; groups must divide the inputs.
        is_lenient=True,
    )


_KINDS: dict[str, Callable[[Any], OpConstraint]] = {
    "Int4WeightOnlyConfig": _parse_int4_config,
    "Int8WeightOnlyConfig": _parse_int8_config,
    "Int8DynamicActivationInt8WeightConfig": lambda config: OpConstraint(
        (Precision.INT8,), approaches=(Approach.DYNAMIC,)
    ),
    "IntxWeightOnlyConfig": _parse_intx_config,
}


def _parse_transformers_config(config: Any) -> OpConstraint | None:
    method = getattr(config, "quant_method", None)
    name = str(getattr(method, "value", method))
    if name == "compressed-tensors":
        return _parse_compressed_config(config)
    if name == "gptq":
        symmetric = bool(getattr(config, "sym", True))
    elif name == "awq":
        symmetric = not getattr(config, "zero_point", True)
    elif method is not None and hasattr(config, "to_diff_dict"):
        raise ConfigurationError(
            f"{type(config).__name__} asks for kernels of {name}, which do not run here; set "
            f"precisions, e.g. 'int4' or 'int8', or give GPTQConfig, AwqConfig, TorchAoConfig or "
            f"CompressedTensorsConfig"
        )
    else:
        return None
    kind = type(config).__name__
    return _make_weight_constraint(config.bits, config.group_size, symmetric, name, kind)


def _parse_compressed_config(config: object) -> OpConstraint:
    scheme = getattr(config, "quantization_config", None) or config
    groups = list((getattr(scheme, "config_groups", None) or {}).values())
    forms = [_get_field_value(group, "weights") for group in groups]
    if len(forms) != 1 or forms[0] is None:
        raise ConfigurationError(
            f"CompressedTensorsConfig must have one group with weights, got {len(groups)} groups; "
            f"set op_wise or optype_wise for others"
        )
    if _get_field_value(groups[0], "input_activations") is not None:
        raise ConfigurationError(
            "input_activations of CompressedTensorsConfig must be None, got a form; set approach = "
            "'dynamic' for INT8 with ranges computed on every run"
        )
    (form,) = forms
    symmetric = bool(_get_field_value(form, "symmetric", True))
    name = type(config).__name__
    return _make_weight_constraint(
        _get_field_value(form, "num_bits", 8),
        _get_field_value(form, "group_size"),
        symmetric,
        "rtn",
        name,
    )


def _get_field_value(holder: object, name: str, otherwise: object = None) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name, otherwise)
    return getattr(holder, name, otherwise)


def _make_weight_constraint(
    bits: int, size: int | None, symmetric: bool, rounding: str, name: str
) -> OpConstraint:
    if bits not in INTEGERS:
        raise ConfigurationError(
            f"bits of {name} must be one of {', '.join(map(str, INTEGERS))}, got {bits!r}"
        )
    if bits == 8:
        return OpConstraint((Precision.INT8,), approaches=(Approach.WEIGHT_ONLY,))
    scheme = Scheme.SYMMETRIC if symmetric else Scheme.ASYMMETRIC
    return make_grouped_limit(
        INTEGERS[bits], None if size in (None, -1) else size, scheme, rounding
    )
