"""Factors of inputs in the constants of the op before, so that no op multiplies at run time.

AWQ multiplies the inputs of a layer by factors. If a normalization, or a layer through a product of
two branches, writes these inputs, and every reader has the same factors, then the scale of the
normalization or the rows of that layer hold them as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np

from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import needed
from neural_mp.adaptors.common.weights.cross_layer_scaling import (
    LayerRescale,
    ScalingGroup,
    find_scaling_groups,
)
from neural_mp.adaptors.common.weights.grouped_weight import Floats, GroupedWeight, GroupParameters

M = TypeVar("M")


def factor_groups(adaptor: Framework[M], model: M) -> tuple[ScalingGroup, ...]:
    """Return the groups of layers whose inputs the constants of one op scale."""
    offered = adaptor.corrections
    if offered is None:
        return ()
    kinds = {name: kind for kind, names in adaptor.op_kinds.items() for name in names}
    layers, preserving = offered.layer_params(model), offered.channel_preserving_ops(model)
    graph = adaptor.graph(model)
    return tuple(find_scaling_groups(graph, kinds, layers, preserving, through_products=True))


def fold_factors(
    adaptor: Framework[M],
    model: M,
    groups: Collection[ScalingGroup],
    weights: Mapping[str, GroupedWeight],
    quantized: Collection[str],
) -> tuple[M, dict[str, GroupedWeight]]:
    """Return the model with folded factors, and the weights without these.

    Args:
        adaptor: the adaptor of the framework.
        model: the model; stays unchanged.
        groups: the groups of the model.
        weights: op → weight in groups.
        quantized: tensors in INT8, whose ranges must not change.
    """
    folded, changes = dict(weights), dict[str, LayerRescale]()
    for group in groups:
        factors = _common_factors(group, folded)
        if factors is None or not set(group.tensors).isdisjoint(quantized):
            continue
        weight = folded.get(group.producer)
        if weight is not None:
            grouped = adaptor.grouped_weights
            if grouped is None or grouped.parameters is not GroupParameters.ZERO_POINTS:
                continue  # rows of bfloat16 parameters would be rounded again
            folded[group.producer] = weight.with_scaled_outputs(factors)
        changes[group.producer] = LayerRescale(outputs=factors)
        for op in group.consumers:
            folded[op] = replace(folded[op], input_factors=None)
    if not changes:
        return model, folded
    offered = needed(adaptor.corrections, adaptor.framework, "constants of layers")
    return offered.with_layer_params(model, changes), folded


def _common_factors(group: ScalingGroup, weights: Mapping[str, GroupedWeight]) -> Floats | None:
    """Return the factors that all layers of a group multiply their inputs by; None if none."""
    factors = [weights[op].input_factors if op in weights else None for op in group.consumers]
    first = factors[0]
    if first is None:
        return None
    alike = all(entry is not None and np.array_equal(entry, first) for entry in factors)
    return first if alike else None
