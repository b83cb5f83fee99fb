"""Limits on precisions and quantization: the model's, an op type's, a single op's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.config.inc_dialect import IGNORED_QUANT_WORDS, QUANT_WORDS
from neural_mp.config.schema import ANY
from neural_mp.config.source import KeyPath, Source
from neural_mp.config.values import split
from neural_mp.core.precision import QUANT_CHOICES, Precision, parse_precisions
from neural_mp.space.capability import Constraints, OpConstraint, QuantConstraint

_OP_WISE = ("quantization", "mixed_precision", "graph_optimization")


def constraints(source: Source, data: Mapping[str, Any]) -> Constraints:
    """The limits of all sections together.

    Raises:
        ConfigurationError: limits contradict each other, or two sections limit the same op.
    """
    quantization = data.get("quantization", {})
    path: KeyPath = ("quantization", "optype_wise")
    by_type = {
        name: _limit(source, limits, (*path, name))
        for name, limits in quantization.get("optype_wise", {}).items()
    }
    model_wise = quantization.get("model_wise", {})
    return Constraints(
        model_wise=_limit(source, model_wise, ("quantization", "model_wise")),
        optype_wise=by_type,
        op_wise=_op_wise(source, data),
    )


def precisions(source: Source, value: object, path: KeyPath) -> tuple[Precision, ...] | None:
    """The precisions written at a key; None for `any`.

    Raises:
        UnknownPrecisionError: one of them does not exist, or there is none.
    """
    words = [part for word in split(value) for part in split(word)]
    if [word.lower() for word in words] == [ANY]:
        return None
    with source.at(path):
        return parse_precisions(words)


def _op_wise(source: Source, data: Mapping[str, Any]) -> dict[str, OpConstraint]:
    found: dict[str, OpConstraint] = {}
    first: dict[str, str] = {}
    for section in _OP_WISE:
        for name, limits in data.get(section, {}).get("op_wise", {}).items():
            path: KeyPath = (section, "op_wise", name)
            if name in found:
                raise source.error(path, f"{first[name]}.op_wise already limits {name!r}")
            found[name] = _limit(source, limits, path)
            first[name] = section
    return found


def _limit(source: Source, limits: Mapping[str, Any], path: KeyPath) -> OpConstraint:
    weight, of_weight = _tensor(source, limits.get("weight", {}), (*path, "weight"))
    activation, of_activation = _tensor(source, limits.get("activation", {}), (*path, "activation"))
    if "precisions" in limits:
        allowed = precisions(source, limits["precisions"], (*path, "precisions"))
    elif of_weight is None or of_activation is None:
        allowed = of_weight or of_activation
    else:
        allowed = tuple(p for p in of_weight if p in of_activation)
        if not allowed:
            words = f"{', '.join(of_weight)} and the activation {', '.join(of_activation)}"
            raise source.error(
                path, f"no precision is left: the dtype of the weight allows {words}"
            )
    return OpConstraint(allowed, weight, activation)


def _tensor(
    source: Source, limits: Mapping[str, Any], path: KeyPath
) -> tuple[QuantConstraint, tuple[Precision, ...] | None]:
    """How a tensor may be quantized, and the precisions that its dtypes leave to the op."""
    allowed = {
        kind: _words(source, words, (*path, kind))
        for kind, words in limits.items()
        if kind != "dtype"
    }
    dtypes = limits.get("dtype")
    if dtypes is None:
        return QuantConstraint(**allowed), None
    whole = tuple(dict.fromkeys(word for word in dtypes if word in QUANT_CHOICES["dtype"]))
    real = [word for word in dtypes if word not in QUANT_CHOICES["dtype"]]
    left = parse_precisions([*real, *([Precision.INT8] if whole else [])])
    return QuantConstraint(dtype=whole or None, **allowed), left


def _words(source: Source, words: list[str], path: KeyPath) -> tuple[str, ...] | None:
    without_meaning = IGNORED_QUANT_WORDS.get(str(path[-1]), {})
    for word in words:
        if word in without_meaning:
            source.ignored((*path, word), without_meaning[word])
    ours = (QUANT_WORDS.get(word, word) for word in words if word not in without_meaning)
    return tuple(dict.fromkeys(ours)) or None
