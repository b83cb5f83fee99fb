"""Configurations of `transformers`: `GPTQConfig`, `AwqConfig` and `CompressedTensorsConfig`.

Only attributes are read, so that the tools behind these classes need not be installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.api.torchao_configs import grouped_limit
from neural_mp.core.enums import Approach, Scheme
from neural_mp.core.precision import INTEGERS, Precision
from neural_mp.errors import ConfigurationError
from neural_mp.space import OpConstraint


def constraint_of(config: object) -> OpConstraint | None:
    """Return the constraint that a configuration means; None if it is not of `transformers`.

    Raises:
        ConfigurationError: a value of the configuration is not supported.
    """
    method = getattr(config, "quant_method", None)
    name = str(getattr(method, "value", method))
    if name == "gptq":
        return _limit(config, symmetric=bool(getattr(config, "sym", True)), rounding="gptq")
    if name == "awq":
        return _limit(config, symmetric=not getattr(config, "zero_point", True), rounding="awq")
    if name == "compressed-tensors":
        return _compressed(config)
    return None


def _limit(config: Any, *, symmetric: bool, rounding: str) -> OpConstraint:
    return _weights(config.bits, config.group_size, symmetric, rounding, type(config).__name__)


def _compressed(config: Any) -> OpConstraint:
    scheme = getattr(config, "quantization_config", None) or config
    groups = list((getattr(scheme, "config_groups", None) or {}).values())
    forms = [_value(group, "weights") for group in groups]
    if len(forms) != 1 or forms[0] is None:
        raise ConfigurationError(
            f"CompressedTensorsConfig must have one group with weights, got {len(groups)} groups; "
            f"set op_wise or optype_wise for others"
        )
    if _value(groups[0], "input_activations") is not None:
        raise ConfigurationError(
            "input_activations of CompressedTensorsConfig must be None, got a form; set approach = "
            "'dynamic' for INT8 with ranges computed on every run"
        )
    (form,) = forms
    symmetric = bool(_value(form, "symmetric", True))
    name = type(config).__name__
    return _weights(_value(form, "num_bits", 8), _value(form, "group_size"), symmetric, "rtn", name)


def _value(holder: Any, name: str, otherwise: Any = None) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name, otherwise)
    return getattr(holder, name, otherwise)


def _weights(
    bits: int, size: int | None, symmetric: bool, rounding: str, name: str
) -> OpConstraint:
    if bits not in INTEGERS:
        raise ConfigurationError(
            f"bits of {name} must be one of {', '.join(map(str, INTEGERS))}, got {bits!r}"
        )
    if bits == 8:
        return OpConstraint((Precision.INT8,), approaches=(Approach.WEIGHT_ONLY,))
    scheme = Scheme.SYMMETRIC if symmetric else Scheme.ASYMMETRIC
    return grouped_limit(INTEGERS[bits], None if size in (None, -1) else size, scheme, rounding)
