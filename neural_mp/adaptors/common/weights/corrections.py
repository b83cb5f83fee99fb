"""Corrections of INT8 layers, which reduce quantization noise without a fallback.

The mathematics is shared by all frameworks; an adaptor provides the constants of its layers and
inserts changed constants into a model (`optional.Corrections`). Factors of inputs of weights in
groups are folded into the constants of the op before in the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from neural_mp.adaptors.common.calibration import compute_channel_nsr
from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import Corrections, require_part
from neural_mp.adaptors.common.quant_params import weight_limit_of
from neural_mp.adaptors.common.weights.cross_layer_scaling import (
    Array,
    LayerParams,
    LayerRescale,
    ScalingGroup,
    find_scaling_groups,
    is_homogeneous,
    round_int8_weight,
)
from neural_mp.adaptors.common.weights.grouped_weight import Floats, GroupedWeight, GroupParameters
from neural_mp.core.graph import OpGraph
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import ChannelStats, Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import CORRECTIONS, RESCALING, OpConfig
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.errors import PlanError
from neural_mp.space import TuningSpace

M = TypeVar("M")

#: Fraction of the difficulty moved from activations to weights: SmoothQuant's alpha.
_SMOOTHQUANT_ALPHA = 0.5
#: Limits of a channel scale, to stay within the range of float32.
_LEAST, _MOST = 1e-12, 1e12
#: For adaptors without corrections: no layers, hence no changes.
_NONE: Corrections[Any] = Corrections(lambda model: {}, lambda model, changes: model)


@dataclass(frozen=True)
class _Network:
    """The parts of a model that corrections need.

    Attributes:
        layers: op → its constants.
        groups: consumer → its scaling group.
        passing: the ops that keep channels separate and in place.
    """

    layers: Mapping[str, LayerParams]
    groups: Mapping[str, ScalingGroup]
    passing: frozenset[str]

    @classmethod
    def from_model(cls, adaptor: Framework[M], model: M, graph: OpGraph) -> _Network:
        kinds, offered = _kinds_by_type(adaptor), adaptor.corrections or _NONE
        layers = offered.layer_params(model)
        preserving = frozenset(offered.channel_preserving_ops(model))
        scaling_groups = find_scaling_groups(graph, kinds, layers, preserving)
        passing = (op.name for op in graph if is_homogeneous(op, kinds.get(op.type), True))
        groups = {consumer: group for group in scaling_groups for consumer in group.consumers}
        return cls(layers, groups, preserving.union(passing))

    def with_loaded_group(self, group: ScalingGroup) -> _Network:
        """Return the network with the weights of a group in memory, otherwise read for each use."""
        layers = {
            name: replace(self.layers[name], weight=partial(np.asarray, self.layers[name].weight()))
            for name in (group.producer, *group.consumers)
        }
        return replace(self, layers={**self.layers, **layers})

    def derive_factors(
        self, group: ScalingGroup, correction: str, channels: ChannelStats | None
    ) -> Array | None:
        """Return the factors of the consumers' input channels; None if they cannot be derived.

        `equalize`: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias
        Correction", 2019, equation 11. `smooth`: Xiao et al., "SmoothQuant", 2023, equation 4; with
        depthwise consumers only, alpha is 1, as their weights have one scale per channel.
        """
        producer = self.layers[group.producer]
        input_limits = [self.layers[name].max_input_weights() for name in group.consumers]
        output_limits = producer.max_output_weights()
        if any(limits.shape != output_limits.shape for limits in input_limits):
            return None
        weights = np.max(input_limits, axis=0).astype(np.float64)
        if correction == "equalize":
            if producer.inputs is None:
                return None
            sizes = output_limits.astype(np.float64)
        else:
            if channels is None or len(channels.low) != len(weights):
                return None
            sizes = np.maximum(np.abs(channels.low), np.abs(channels.high))
        depthwise = all(self.layers[name].is_depthwise for name in group.consumers)
        moved = 1.0 if depthwise else _SMOOTHQUANT_ALPHA
        result = sizes**moved / np.maximum(weights, _LEAST) ** (1 - moved)
        dead = (output_limits == 0) | (weights == 0) | (result == 0) | ~np.isfinite(result)
        if dead.all():
            return None
        # A zero or unread channel defines no factor; the median is neutral.
        result[dead] = np.median(result[~dead])
        return np.clip(result, _LEAST, _MOST)


def score_corrections(
    adaptor: Framework[M], model: M, space: TuningSpace, observations: Observations
) -> Observations:
    """Return observations with the NSR of every noisy tensor after each correction."""
    if not observations.channels:
        return observations
    network = _Network.from_model(adaptor, model, space.graph)
    corrected: dict[str, dict[str, float]] = {}
    for tensor in space.tensors:
        channels = observations.channels.get(tensor.name)
        group = next((network.groups[op] for op in tensor.consumers if op in network.groups), None)
        if channels is None or group is None or not set(tensor.consumers) <= set(group.consumers):
            continue
        in_memory, stats = (
            network.with_loaded_group(group),
            _merged_channel_stats(group, observations),
        )
        for correction in RESCALING:
            factors = in_memory.derive_factors(group, correction, stats)
            if factors is not None and len(factors) == len(channels.low):
                consumers = {name: weight_limit_of(space, name) for name in group.consumers}
                nsr = _estimate_rescaling_noise(in_memory, consumers, factors, channels)
                corrected.setdefault(tensor.name, {})[correction] = nsr
    return replace(observations, corrected_nsr=corrected)


def _estimate_rescaling_noise(
    network: _Network, consumers: Mapping[str, int], factors: Array, channels: ChannelStats
) -> float:
    """Return the NSR of a rescaled tensor plus that of the weights that compensate for it.

    `consumers` are the consumers of the tensor with the largest integer of their weights.
    """
    low, high, power = (
        np.asarray(values) for values in (channels.low, channels.high, channels.power)
    )
    own = compute_channel_nsr((low / factors).min(), (high / factors).max(), power / factors**2)
    return own + max(
        _estimate_weight_noise(network.layers[name], factors, power, limit)
        for name, limit in consumers.items()
    )


def _estimate_weight_noise(layer: LayerParams, factors: Array, power: Array, limit: int) -> float:
    """Return the NSR of a layer's result due to its rounded weight, averaged over outputs.

    Errors and values of different channels are assumed to be uncorrelated.
    """
    matrix = LayerRescale(inputs=factors).rescale_weight(layer)
    scaled = replace(layer, weight=lambda: matrix).as_matrix().astype(np.float64)
    energy = (power / factors**2).reshape(scaled.shape[0], 1, scaled.shape[2], 1)
    steps = np.abs(scaled).max(axis=(2, 3)) / limit
    noise = steps**2 / 12 * (energy * scaled.shape[3]).sum(axis=(2, 3))
    signal = (scaled**2 * energy).sum(axis=(2, 3))
    live = signal > 0
    return float(np.minimum(1.0, noise[live] / signal[live]).mean()) if live.any() else 0.0


def apply_corrections(
    adaptor: Framework[M],
    model: M,
    plan: PrecisionPlan,
    observations: Observations,
    space: TuningSpace,
) -> tuple[M, Observations]:
    """Return the model with the corrections of a plan, and its adapted observations.

    Raises:
        PlanError: a correction in the plan cannot be applied.
    """
    configs = {op: config for op, config in plan.items() if config.corrections}
    if not configs:
        return model, observations
    network = _Network.from_model(adaptor, model, space.graph)
    changes: dict[str, LayerRescale] = {}
    for group, correction in _find_rescaled_groups(network, configs).items():
        channels = _merged_channel_stats(group, observations)
        factors = network.derive_factors(group, correction, channels)
        if factors is None or channels is None or len(factors) != len(channels.low):
            raise PlanError(
                f"correction {correction!r} of op {group.consumers[0]!r} requires channel "
                f"statistics that match {group.producer!r}; calibrate with the same model, or "
                f"remove the correction"
            )
        _update_rescale(changes, group.producer, outputs=1 / factors)
        for consumer in group.consumers:
            _update_rescale(changes, consumer, inputs=factors)
        observations = _rescale_model_observations(observations, group, factors, channels)
    for op, config in configs.items():
        if "bias_correction" in config.corrections and not config.is_reconstructed:
            layer = network.layers.get(op)
            mean = _input_channel_means(network, space.graph, op, observations)
            shift = None
            if layer is not None and layer.inputs is not None and mean is not None:
                shift = _compute_lost_mean(layer, changes.get(op), mean, weight_qmax(config.weight))
            if shift is None:
                raise PlanError(
                    f"correction 'bias_correction' of op {op!r} requires channel statistics of its "
                    f"input; calibrate again, or remove the correction"
                )
            _update_rescale(changes, op, shift=shift)
    return (adaptor.corrections or _NONE).with_layer_params(model, changes), observations


def find_rescaled_ops(
    adaptor: Framework[M], model: M, plan: PrecisionPlan, graph: OpGraph
) -> frozenset[str]:
    """Return the ops whose per-channel result scales change under the corrections of a plan."""
    configs = {op: config for op, config in plan.items() if config.corrections}
    if not configs:
        return frozenset()
    network = _Network.from_model(adaptor, model, graph)
    groups = _find_rescaled_groups(
        network, {op: configs[op] for op in configs if op in network.groups}
    )
    return frozenset(name for group in groups for name in (group.producer, *group.tensors))


def _find_rescaled_groups(
    network: _Network, configs: Mapping[str, OpConfig]
) -> dict[ScalingGroup, str]:
    """Return scaling group → its correction: the first in the configs of its consumers."""
    corrections: dict[ScalingGroup, str] = {}
    for op, config in configs.items():
        correction = next((name for name in config.corrections if name in RESCALING), None)
        if correction is None:
            continue
        if op not in network.groups:
            raise PlanError(
                f"correction {correction!r} ({CORRECTIONS[correction]}) requires an input from a "
                f"layer without other consumers, unlike that of op {op!r}; remove the correction"
            )
        corrections.setdefault(network.groups[op], correction)
    return corrections


def _merged_channel_stats(group: ScalingGroup, observations: Observations) -> ChannelStats | None:
    stats = [observations.channels[name] for name in group.tensors if name in observations.channels]
    if not stats or len({len(channels.low) for channels in stats}) > 1:
        return None
    low, high, power = (
        np.array([getattr(channels, name) for channels in stats])
        for name in ("low", "high", "power")
    )
    return ChannelStats(
        low=tuple(low.min(axis=0)),
        high=tuple(high.max(axis=0)),
        power=tuple(power.max(axis=0)),
        mean=stats[-1].mean,
    )


def _update_rescale(changes: dict[str, LayerRescale], op: str, **parts: Array) -> None:
    changes[op] = replace(changes.get(op, LayerRescale()), **parts)


def _rescale_model_observations(
    observations: Observations, group: ScalingGroup, factors: Array, merged: ChannelStats
) -> Observations:
    """Return the observations of the rescaled model: exact, except that no range is clipped.

    A tensor without channel statistics gets the smallest range that is guaranteed to cover it.
    """
    ranges, channels = dict(observations.ranges), dict(observations.channels)
    for name in group.tensors:
        if name not in ranges:
            continue
        stats = channels.get(name, merged)
        low, high = np.asarray(stats.low) / factors, np.asarray(stats.high) / factors
        power, mean = np.asarray(stats.power) / factors**2, np.asarray(stats.mean) / factors
        if name in channels:
            channels[name] = ChannelStats(tuple(low), tuple(high), tuple(power), tuple(mean))
            full = (min(0.0, float(low.min())), max(0.0, float(high.max())))
        else:
            least, most = ranges[name]["minmax"]
            full = (least / float(factors.min()), most / float(factors.min()))
        ranges[name] = dict.fromkeys(RANGE_ALGORITHMS, full)
    return replace(observations, ranges=ranges, channels=channels)


def _input_channel_means(
    network: _Network, graph: OpGraph, op: str, observations: Observations
) -> Array | None:
    """Return the mean of every input channel of an op, looked up past quantize-agnostic ops."""
    name = next(iter(graph[op].inputs), "")
    while name not in observations.channels:
        if name not in network.passing or not graph[name].quantize_agnostic:
            return None
        name = graph[name].inputs[0]
    return np.asarray(observations.channels[name].mean)


def _compute_lost_mean(
    layer: LayerParams, change: LayerRescale | None, mean: Array, limit: int
) -> Array | None:
    """Return the mean result lost by rounding the weight (Nagel et al., section 4.2).

    None if the channels of `mean` do not match.
    """
    weight = (change or LayerRescale()).rescale_weight(layer)
    matrix = replace(layer, weight=lambda: weight).as_matrix().astype(np.float64)
    if mean.size != matrix.shape[0] * matrix.shape[2]:
        return None
    lost = (matrix - round_int8_weight(matrix, limit)).sum(axis=3)
    return np.asarray((lost * mean.reshape(matrix.shape[0], 1, -1)).sum(axis=2).reshape(-1))


def find_factor_groups(adaptor: Framework[M], model: M) -> tuple[ScalingGroup, ...]:
    """Return the groups of layers whose inputs the constants of one op scale."""
    offered = adaptor.corrections
    if offered is None:
        return ()
    layers, preserving = offered.layer_params(model), offered.channel_preserving_ops(model)
    graph, kinds = adaptor.graph(model), _kinds_by_type(adaptor)
    return tuple(find_scaling_groups(graph, kinds, layers, preserving, through_products=True))


def _kinds_by_type(adaptor: Framework[M]) -> dict[str, str]:
    return {name: kind for kind, names in adaptor.op_kinds.items() for name in names}


def fold_factors(
    adaptor: Framework[M],
    model: M,
    groups: Collection[ScalingGroup],
    weights: Mapping[str, GroupedWeight],
    quantized: Collection[str],
) -> tuple[M, dict[str, GroupedWeight]]:
    """Return the model with the factors of inputs in the constants of the op before.

    Also the weights without these factors, so that no op multiplies at run time. AWQ multiplies the
    inputs of a layer by factors. If a normalization, or a layer through a product of two branches,
    writes these inputs, and every reader has the same factors, then the scale of the normalization
    or the rows of that layer hold them as well; but not those of `quantized` tensors, whose ranges
    must not change.
    """
    folded, changes = dict(weights), dict[str, LayerRescale]()
    for group in groups:
        factors = _derive_common_factors(group, folded)
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
    offered = require_part(adaptor.corrections, adaptor.framework, "constants of layers")
    return offered.with_layer_params(model, changes), folded


def _derive_common_factors(
    group: ScalingGroup, weights: Mapping[str, GroupedWeight]
) -> Floats | None:
    """Return the factors that all layers of a group multiply their inputs by; None if none."""
    factors = [weights[op].input_factors if op in weights else None for op in group.consumers]
    first = factors[0]
    if first is None:
        return None
    alike = all(entry is not None and np.array_equal(entry, first) for entry in factors)
    return first if alike else None
