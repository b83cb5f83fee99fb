"""The framework-independent pipelines of calibration, and of a resolved plan before conversion."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from neural_mp.adaptors.common.calibration import (
    CalibrationInputs,
    Observer,
    summarize_observations,
)
from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.adaptors.common.weights.corrections import apply_corrections, fold_factors
from neural_mp.adaptors.common.weights.reconstruction import Reconstruction
from neural_mp.core.graph import OpGraph
from neural_mp.core.observations import ChannelRange, KeptOutputs, Observations, Range
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quantization_flow import (
    QuantizationFlow,
    find_observable_tensors,
    propagate_quantization,
)
from neural_mp.errors import ConversionError, PlanError
from neural_mp.space import ResolvedPlan, TuningSpace


def find_first_readers(flow: QuantizationFlow, plan: PrecisionPlan) -> dict[str, OpConfig]:
    """Return quantized tensor → the config of its first consumer with an activation config.

    Tensors with a shared scale are listed under its owner (`QuantizationFlow.scale_owner`).
    """
    configs: dict[str, OpConfig] = {}
    for op, sources in flow.int8_reads.items():
        config = plan.get(op)
        if config is not None and config.activation is not None:
            for source in sources:
                configs.setdefault(flow.scale_owner[source], config)
    return configs


def choose_quantized_ranges(
    graph: OpGraph, plan: ResolvedPlan, observations: Observations
) -> dict[str, Range]:
    """Return quantized tensor → the range that its scale must cover.

    Ranges of tensors with a shared scale are joined. The first consumer decides on the calibration
    algorithm, or else the producer of the tensor.

    Raises:
        ConversionError: a tensor to be quantized was not observed.
    """
    flow, readers = plan.flow, find_first_readers(plan.flow, plan.plan)
    tensor_ranges = {}
    for root in dict.fromkeys(flow.scale_owner.values()):
        _refuse_split_kernels(graph, root, plan.plan)
        config = readers.get(root)
        if config is None and root in graph:
            config = plan.plan.get(graph[root].fusion_group or root)
        algorithm = config.activation.algorithm if config and config.activation else "minmax"
        members = flow.scale_members[root]
        ranges = [_get_observed_range(tensor, algorithm, observations) for tensor in members]
        tensor_ranges[root] = min(low for low, _ in ranges), max(high for _, high in ranges)
    for tensor in tensors_with_channel_scales(graph, flow) & observations.channels.keys():
        span, channels = tensor_ranges[tensor], observations.channels[tensor]
        low, high = np.clip([channels.low, channels.high], *span).tolist()
        tensor_ranges[tensor] = ChannelRange(span, zip(low, high, strict=True))
    return tensor_ranges


def tensors_with_channel_scales(graph: OpGraph, flow: QuantizationFlow) -> frozenset[str]:
    """Return the quantized tensors that only ops with a scale per channel read."""
    readers: dict[str, list[str]] = defaultdict(list)
    for op, sources in flow.int8_reads.items():
        for source in sources:
            readers[source].append(op)
    shared = Counter(flow.scale_owner.values())
    return frozenset(
        tensor
        for tensor, ops in readers.items()
        if shared[tensor] == 1 and all(graph[op].channel_scales for op in ops)
    )


def _refuse_split_kernels(graph: OpGraph, tensor: str, plan: PrecisionPlan) -> None:
    if tensor not in graph:
        return
    head = graph[graph[tensor].fusion_group or tensor]
    if not (head.writes_int8 or head.joins_int8):
        return
    for op in graph.consumers(tensor):
        named = plan.get(op.name)
        if op.fusion_group == head.name and named is not None and not named.precision.is_integer:
            raise PlanError(
                f"ops {tensor!r} and {op.name!r} run in one integer kernel and must have the same "
                f"precision, got int8 and {named.precision}; set both to one precision"
            )


def _get_observed_range(tensor: str, algorithm: str, observations: Observations) -> Range:
    try:
        return observations.ranges[tensor][algorithm]
    except KeyError:
        raise ConversionError(
            f"tensor {tensor!r} must be quantized, which requires an observed {algorithm} range; "
            f"calibrate first, or give a plan file with observations"
        ) from None


M = TypeVar("M")


def prepare_conversion(
    adaptor: Framework[M],
    model: M,
    plan: ResolvedPlan,
    observations: Observations,
    space: TuningSpace,
    corrected: CorrectedWeights[M] | None = None,
) -> tuple[M, dict[str, Range]]:
    """Return the FP32 model with the corrections of a plan, and the ranges of quantized tensors.

    Errors as in `Adaptor.convert`.
    """
    rescaled, updated = apply_corrections(adaptor, model, plan.plan, observations, space)
    ranges = choose_quantized_ranges(space.graph, plan, updated)
    corrected = corrected or CorrectedWeights(adaptor, model)
    samples = observations.samples
    # Without a name, so that its copies of weights end here.
    rescaled = Reconstruction(
        rescaled, plan, ranges, space.graph, samples, corrected
    ).build_rounded_model()
    weights = corrected.of_plan(plan.plan)
    if any(weight.input_factors is not None for weight in weights.values()):
        quantized = plan.flow.scale_owner.keys()
        rescaled, weights = fold_factors(
            adaptor, rescaled, corrected.scaling_groups, weights, quantized
        )
    if weights:
        offered = require_part(adaptor.grouped_weights, adaptor.framework, "corrections of weights")
        rescaled = offered.with_weights(rescaled, weights)
    return rescaled, ranges


def collect_observations(
    adaptor: Framework[M],
    model: M,
    batches: Iterable[Any],
    space: TuningSpace,
    retained: KeptOutputs | None = None,
    ranged: frozenset[str] | None = None,
) -> Observations:
    """Observe every tensor that may be quantized in one pass over calibration inputs.

    These are the `ranged` tensors, by default those that INT8 kernels of the space read or write.
    Tensors without calibrated ranges, which only dynamic INT8 quantizes, are checked for NaN and
    Inf. The outputs are `retained` if the adaptor offers it.

    Raises:
        ConversionError: no output holds a finite value.
        DataError: NaN in every sample reaches the outputs.
    """
    inputs = CalibrationInputs(batches, partial(adaptor.predict, model))
    if ranged is None:
        ranged = find_observable_tensors(space.graph, space.int8_ops)
    tensors = ranged.union(*(space.graph[op].read_in_int8 for op in space.dynamic_ops))
    observers: defaultdict[str, Observer] = defaultdict(Observer)
    if retained is None:
        summaries = adaptor.observe_tensors(model, inputs, tensors)
    else:
        summaries = adaptor.observe_and_keep(model, inputs, tensors, retained)
    for name, summary in summaries:
        if summary.non_finite:
            inputs.note_non_finite()
        observers[name].update(summary, inputs.number)
    inputs.check_outputs()
    flow = propagate_quantization(space.graph, dict.fromkeys(space.int8_ops, Precision.INT8))
    by_channel = tensors_with_channel_scales(space.graph, flow)
    observations = summarize_observations(
        observers, inputs.samples, by_channel, without_ranges=tensors - ranged
    )
    return replace(observations, nan_samples=inputs.damaged)
