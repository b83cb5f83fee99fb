"""Limits on ops in INC's terms: weight-only `{bits, group_size, scheme, algorithm}`, op types.

Sources of the op types: `neural_compressor/adaptor/*.yaml` and `unify_op_type_mapping` of the
adaptors there, Intel Neural Compressor 1.14 (Apache License 2.0).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from neural_mp.core.enums import Scheme
from neural_mp.core.precision import INTEGERS, Precision
from neural_mp.errors import ConfigurationError, error_path
from neural_mp.space.capability import Constraints, OpConstraint, QuantConstraint
from neural_mp.util.validators import is_integer

logger = logging.getLogger("neural_mp")
V = TypeVar("V")

#: INC's algorithm → ours.
_ROUNDINGS = {name.upper(): name for name in ("rtn", "gptq", "awq", "hqq", "autoround")}
_SCHEMES = {"sym": Scheme.SYMMETRIC.value, "asym": Scheme.ASYMMETRIC.value}
_KEYS = ("bits", "group_size", "scheme", "algorithm", "dtype")
_FLOATS = ("fp32", "bf16")


def weight_only_limits(
    by_type: Mapping[str, Any] | None, by_name: Mapping[str, Any] | None
) -> tuple[Constraints, tuple[Precision, ...]]:
    """Return constraints of INC's dicts for op types and op names, and the precisions they name.

    Raises:
        ConfigurationError: a key or a value is unknown, or not supported here.
    """
    types = _parse_limits("op_type_dict", by_type)
    names = _parse_limits("op_name_dict", by_name)
    model = types.pop(".*", OpConstraint())  # INC's pattern for all op types
    limits = (model, *types.values(), *names.values())
    bits = {p for limit in limits for p in limit.precisions or () if p.is_integer}
    return Constraints(model, types, names), tuple(sorted(bits, key=lambda p: p.bits))


def _parse_limits(option: str, by_key: Mapping[str, Any] | None) -> dict[str, OpConstraint]:
    return {name: _parse_limit(option, name, limits) for name, limits in (by_key or {}).items()}


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
            _parse_values(weight, "bits", INTEGERS),
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


def _translate_value(key: str, value: object, known: Mapping[Any, V]) -> V:
    if value not in known:
        raise ConfigurationError(
            f"{key} of a weight must be one of {', '.join(map(str, known))}, got {value!r}"
        )
    return known[value]


def _parse_values(
    weight: Mapping[str, Any], key: str, known: Mapping[Any, V]
) -> tuple[V, ...] | None:
    return tuple(_translate_value(key, value, known) for value in _list_values(weight, key)) or None


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


#: INC's name, normalized by `_normalize_type` → op types, if different from the name.
_OTHERWISE: Mapping[str, tuple[str, ...]] = {
    # PyTorch modules, and the fused modules of eager mode.
    "linear": ("linear", "addmm"),
    "linearrelu": ("linear", "addmm"),
    **{f"conv{d}": (f"conv{d}", "convolution") for d in ("1d", "3d")},
    **{f"conv{name}{d}": (f"conv{d}",) for name in ("relu", "bn", "bnrelu") for d in ("2d", "3d")},
    **{f"batchnorm{d}": ("batch_norm",) for d in ("1d", "2d", "3d")},
    **{f"bnrelu{d}": ("batch_norm",) for d in ("2d", "3d")},
    **{f"instancenorm{d}": ("instance_norm",) for d in ("1d", "2d", "3d")},
    "relu6": ("relu6", "hardtanh", "Relu6"),
    "embedding": ("embedding",),
    "embeddingbag": ("embedding_bag",),
    "floatfunctional": ("add", "mul", "cat"),
    "lstm": ("lstm", "LSTM"),
    "gru": ("gru", "GRU"),
    "quantstub": (),
    "dropout": (),
    # One name for several TensorFlow op types.
    "conv2d": ("conv2d", "Conv2D", "DepthwiseConv2dNative"),
    "batchnorm": ("FusedBatchNormV3",),
    "pooling": ("MaxPool", "MaxPool3D", "AvgPool"),
    "concat": ("cat", "Concat", "ConcatV2"),
    "concatv2": ("ConcatV2",),
    "matmul": ("matmul", "MatMul", "BatchMatMul", "BatchMatMulV2"),
    "pad": ("Pad",),
    # ONNX types outside the standard schemas, found in optimized models.
    "attention": ("Attention",),
    "embedlayernormalization": ("EmbedLayerNormalization",),
    **{
        name: (name.capitalize(),)
        for name in ("conv", "gather", "gemm", "split", "squeeze", "reshape", "resize", "add")
    },
}


def matching_op_types(types: Iterable[str], op_type: str) -> tuple[str, ...] | None:
    """Return the op types of a model that an op type in INC's files means, maybe none.

    None if the name is neither an INC name nor an op type of the model.
    """
    plain = _normalize_type(op_type)
    meant = _OTHERWISE.get(plain, ())
    matches = tuple(name for name in types if name in meant or _normalize_type(name) == plain)
    return matches if matches or plain in _OTHERWISE else None


def _normalize_type(op_type: str) -> str:
    return op_type.casefold().replace("_", "")
