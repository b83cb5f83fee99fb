"""Weight-only quantization of INC 2.x: `weight: {bits, group_size, scheme, algorithm}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from neural_mp.core.enums import Scheme
from neural_mp.core.precision import INTEGERS, Precision
from neural_mp.errors import ConfigurationError, error_path
from neural_mp.space.capability import Constraints, OpConstraint, QuantConstraint
from neural_mp.util.validators import is_integer

logger = logging.getLogger("neural_mp")

#: INC's algorithm → ours.
_ROUNDINGS = {
    "RTN": "rtn",
    "GPTQ": "gptq",
    "AWQ": "awq",
    "HQQ": "hqq",
    "AUTOROUND": "autoround",
}
_SCHEMES = {"sym": Scheme.SYMMETRIC, "asym": Scheme.ASYMMETRIC}
#: INC's pattern for all op types.
_ALL = ".*"
_KEYS = ("bits", "group_size", "scheme", "algorithm", "dtype")
_FLOATS = ("fp32", "bf16")


def weight_only_limits(
    by_type: Mapping[str, Any] | None, by_name: Mapping[str, Any] | None
) -> tuple[Constraints, tuple[Precision, ...]]:
    """Return constraints of INC's dicts for op types and op names, and the precisions they name.

    Raises:
        ConfigurationError: a key or a value is unknown, or not supported here.
    """
    types = {
        name: _parse_limit("op_type_dict", name, limits) for name, limits in (by_type or {}).items()
    }
    names = {
        name: _parse_limit("op_name_dict", name, limits) for name, limits in (by_name or {}).items()
    }
    model = types.pop(_ALL, OpConstraint())
    limits = (model, *types.values(), *names.values())
    bits = {p for limit in limits for p in limit.precisions or () if p.is_integer}
    return Constraints(model, types, names), tuple(sorted(bits, key=lambda p: p.bits))


def _parse_limit(option: str, name: str, limits: Mapping[str, Any]) -> OpConstraint:
    with error_path(option, name, "weight"):
        weight = limits.get("weight", {})
        unknown = [key for key in weight if key not in _KEYS]
        if unknown:
            raise ConfigurationError(
                f"keys of a weight must be {', '.join(_KEYS)}, got {unknown[0]!r}; remove the key"
            )
        dtypes = _list_values(weight, "dtype")
        if dtypes and all(dtype in _FLOATS for dtype in dtypes):
            return OpConstraint(tuple(Precision(dtype) for dtype in dtypes))
        if any(dtype != "int" for dtype in dtypes):
            raise ConfigurationError(
                f"dtype of a weight must be int, or {' or '.join(_FLOATS)}, got {dtypes[0]!r}; "
                f"types such as nf4 have no kernel here"
            )
        return OpConstraint(
            tuple(_one_of("bits", bits, INTEGERS) for bits in _list_values(weight, "bits")) or None,
            QuantConstraint(
                scheme=_parse_values(weight, "scheme", _SCHEMES),
                group_size=_group_sizes(name, weight),
                rounding=_parse_values(weight, "algorithm", _ROUNDINGS),
            ),
            # INT8 has one scale per channel and no corrections: such limits do not apply.
            is_lenient=True,
        )


def _list_values(weight: Mapping[str, Any], key: str) -> list[Any]:
    value = weight.get(key)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _one_of(key: str, value: Any, known: Mapping[Any, Any]) -> Any:
    if value not in known:
        raise ConfigurationError(
            f"{key} of a weight must be one of {', '.join(map(str, known))}, got {value!r}"
        )
    return known[value]


def _parse_values(
    weight: Mapping[str, Any], key: str, known: Mapping[str, str]
) -> tuple[str, ...] | None:
    return tuple(str(_one_of(key, value, known)) for value in _list_values(weight, key)) or None


def _group_sizes(name: str, weight: Mapping[str, Any]) -> tuple[int, ...] | None:
    sizes = _list_values(weight, "group_size")
    wrong = [size for size in sizes if not is_integer(size) or (size < 1 and size != -1)]
    if wrong:
        raise ConfigurationError(
            f"group_size of a weight must be a whole number from 1, or -1, got {wrong[0]!r}"
        )
    if -1 in sizes:
        logger.warning(
            "%s: group_size=-1, one scale per channel, holds for 8 bits; weights in fewer bits "
            "take the largest groups of their kernel",
            name,
        )
        return None
    return tuple(map(int, sizes)) or None
