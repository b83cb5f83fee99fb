"""AI Edge Quantizer behind functions of this package: the only module that imports it.

Its API is alpha, hence the pin to one minor version.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import numpy as np
from ai_edge_quantizer import (
    default_policy,
    model_modifier,
    params_generator,
    qtyping,
    recipe_manager,
)
from ai_edge_quantizer.algorithm_manager import AlgorithmName
from ai_edge_quantizer.algorithms.nonlinear_quantize import float_casting

from neural_mp.errors import ConversionError, one_line
from neural_mp.util.pytree import Array

#: Types that the quantizer names otherwise than the schema.
_NAMES = {"TRANSPOSE_CONV": "CONV_2D_TRANSPOSE"}
#: Characters of a scope that the quantizer compares.
_MAX_SCOPE_CHARS = 10_000
_ALL = qtyping.TFLOperationName.ALL_SUPPORTED


class Kind(Enum):
    """Kind of an op in a recipe.

    `STATIC`: inputs and results in INT8, with ranges; `DYNAMIC`: a weight in integers, and inputs
    that the kernel rounds on every run, if the op computes; `WEIGHT`: a weight in integers,
    restored on loading; `HALF`: a weight in FP16, restored on loading.
    """

    STATIC = "static"
    DYNAMIC = "dynamic"
    WEIGHT = "weight_only"
    HALF = "half"


@dataclass(frozen=True)
class Form:
    """Form of an op in a recipe.

    Attributes:
        bits: bits of an integer weight.
        block: number of consecutive inputs that share a scale, one of `BLOCKS`; None for one scale
            per channel.
    """

    kind: Kind
    bits: int = 8
    block: int | None = None


STATIC, DYNAMIC, WEIGHT, HALF = map(Form, Kind)
#: Numbers of inputs that may share a scale.
BLOCKS = (32, 64, 128, 256)


@dataclass(frozen=True)
class Step:
    """One op of a recipe; `scope` are the names of its results, each followed by a semicolon."""

    scope: str
    form: Form


def _make_op_config(form: Form) -> qtyping.OpQuantizationConfig:
    integer, floating = qtyping.ComputePrecision.INTEGER, qtyping.ComputePrecision.FLOAT
    if form.kind is Kind.HALF:
        half = qtyping.TensorQuantizationConfig(16, dtype=qtyping.TensorDataType.FLOAT)
        return qtyping.OpQuantizationConfig(None, half, floating, explicit_dequantize=True)
    granularity = "CHANNELWISE" if form.block is None else f"BLOCKWISE_{form.block}"
    weight = qtyping.TensorQuantizationConfig(
        form.bits, symmetric=True, granularity=qtyping.QuantGranularity(granularity)
    )
    if form.kind is Kind.WEIGHT:
        return qtyping.OpQuantizationConfig(None, weight, floating, explicit_dequantize=True)
    is_static = form.kind is Kind.STATIC
    activation = qtyping.TensorQuantizationConfig(8, symmetric=False) if is_static else None
    return qtyping.OpQuantizationConfig(activation, weight, integer)


def make_recipe(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """Return the recipe of a plan, as the quantizer's own command reads it from JSON.

    Later entries overrule earlier ones: inputs and outputs of the graph stay float, although the
    scope of an output is the name of the op before.
    """
    tool = recipe_manager.RecipeManager()
    scopes: dict[Form, list[str]] = {}
    for step in steps:
        scopes.setdefault(step.form, []).append(step.scope)
    for form, named in scopes.items():
        # The quantizer tries each expression on each op: one expression for all ops of a form.
        alternatives = "|".join(map(_escape_scope, named))
        is_half = form.kind is Kind.HALF
        tool.add_quantization_config(
            f"^(?:{alternatives})",
            _ALL,
            _make_op_config(form),
            AlgorithmName.FLOAT_CASTING if is_half else AlgorithmName.MIN_MAX_UNIFORM_QUANT,
        )
    for boundary in (qtyping.TFLOperationName.INPUT, qtyping.TFLOperationName.OUTPUT):
        tool.add_quantization_config(".*", boundary, None, AlgorithmName.NO_QUANTIZE)
    recipe: list[dict[str, Any]] = tool.get_quantization_recipe()
    return recipe


def _escape_scope(scope: str) -> str:
    """Return an expression for one scope, which the quantizer cuts at some length."""
    short = scope[:_MAX_SCOPE_CHARS]
    return re.escape(short) + ("$" if short == scope else "")


class _TreeModifier(model_modifier.ModelModifier):
    """The last step of the quantizer, which returns the parsed graph instead of its bytes."""

    def _serialize_small_model(self, quantized_model: Any) -> Any:
        return quantized_model

    def _serialize_model(self, quantized_model: Any, *_: Any, **__: Any) -> Any:
        return quantized_model


def quantize_tree(
    tree: Any, recipe: list[dict[str, Any]], statistics: Mapping[str, Mapping[str, Array]]
) -> Any:
    """Return a parsed flatbuffer (`ModelT`) with the ops of a recipe in integers.

    Args:
        tree: the float graph, which stays as it is.
        recipe: the recipe of `make_recipe`.
        statistics: float tensor → `min` and `max`; of every tensor that a static op reads or
            writes, and of weights whose range is not that of their values.

    Raises:
        ConversionError: a range is not finite, or the quantizer refuses the recipe.
    """
    for name, values in statistics.items():
        if not np.isfinite([values["min"], values["max"]]).all():
            # LiteRT 2.3 ends the process on a scale that is NaN.
            raise ConversionError(
                f"the range of tensor {name!r} must be finite, got {values['min'].min()} to "
                f"{values['max'].max()}; calibrate with finite data"
            )
    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(recipe)
    # The steps of `Quantizer.quantize`, which parses and packs the graph in addition.
    try:
        with _without_root_handler():
            params = params_generator.ParamsGenerator(tree).generate_quantization_parameters(
                manager, statistics, enable_progress_bar=False
            )
            return _TreeModifier(tree).modify_model(params, enable_progress_bar=False)
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        # Types of its errors vary.
        raise ConversionError(f"AI Edge Quantizer refuses the plan: {one_line(error)}") from error


@contextmanager
def _without_root_handler() -> Iterator[None]:
    """Keep `logging.info`, which the quantizer calls, from adding a handler to the root logger.

    Every warning of this package would be written twice.
    """
    handler = logging.NullHandler()
    logging.root.addHandler(handler)
    try:
        yield
    finally:
        logging.root.removeHandler(handler)


@lru_cache(maxsize=16)
def list_supported_types(form: Form) -> frozenset[str]:
    """Return the op types, named as in the schema, that the quantizer has in a form."""
    names = {theirs: ours for ours, theirs in _NAMES.items()}
    config = _make_op_config(form)
    policy = default_policy.DEFAULT_CONFIG_CHECK_POLICY
    if form.kind is Kind.HALF:
        operations = float_casting.SUPPORTED_WEIGHT_QUANT_OPS
    else:
        operations = frozenset(name for name, configs in policy.items() if config in configs)
    return frozenset(names.get(operation.value, operation.value) for operation in operations)
