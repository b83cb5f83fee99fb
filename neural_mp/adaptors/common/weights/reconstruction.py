"""Reconstruction of INT8 layers: weights rounded for the FP32 results of layers, without labels.

Layers are taken in the order of the graph, a few at a time: calibration samples run through the
float model and through a float model with rounded weights in all layers so far, and every layer
learns to give the results of the first from the inputs of the second, rounded as its kernel rounds
them. Memory is that of the moments of these layers, whatever the number of samples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Generic, TypeVar

import numpy as np

from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import Corrections, require_part
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.weights.adaround import (
    Floats,
    LayerError,
    RoundedLayer,
    WeightGrid,
    count_rounding_operations,
    reconstruct_layer_weight,
)
from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.corrected_weights import (
    CorrectedWeights,
    LayerErrors,
    split_portions,
)
from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerParams, LayerRescale
from neural_mp.adaptors.common.weights.grouped_weight import CodedGroups, GroupedWeight, middle_code
from neural_mp.core.enums import Approach, CalibrationAlgorithm, Granularity, QuantDType, Scheme
from neural_mp.core.graph import OpGraph
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import ChannelRange, Range
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import RECONSTRUCTIONS, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError
from neural_mp.space import ResolvedPlan
from neural_mp.util.pytree import Array

M = TypeVar("M")
logger = logging.getLogger(__name__)

#: Maximum number of passes over the samples; deeper models learn several layers per pass.
_PASSES = 16
#: Operations that processors take some minutes for.
_OPERATIONS_OF_MINUTES = 1.5e13
#: Maximum bytes of moments at a time, and bytes of a float.
_MOMENT_BYTES, _FLOAT = 1 << 30, 4
#: Number of rows that the moments are taken of: a multiple of the inputs, at least in the minimum.
_ROWS_PER_INPUT, _LEAST_ROWS = 4, 1 << 14
_BITS = 8


def reconstructable_layers(adaptor: Framework[M], model: M) -> frozenset[str]:
    """Return the layers whose weight can be reconstructed; empty if the framework offers none."""
    offered = adaptor.corrections
    if offered is None or offered.values is None:
        return frozenset()
    return frozenset(op for op, layer in offered.layer_params(model).items() if layer.has_rows)


def reconstructable_in_minutes(
    adaptor: Framework[M], model: M, options: LearnOptions
) -> frozenset[str]:
    """Return the `reconstructable_layers` that are learned in some minutes, small ones first."""
    if adaptor.corrections is None:
        return frozenset()
    layers = adaptor.corrections.layer_params(model)
    costs = {}
    for op in reconstructable_layers(adaptor, model):
        weight = _make_weight_matrix(layers[op])
        moments = 2.0 * _count_rows(weight) * _count_moments(layers[op])
        costs[op] = count_rounding_operations(weight, options) + moments
    ordered = sorted(costs, key=lambda op: (costs[op], op))
    sums = accumulate(costs[op] for op in ordered)
    return frozenset(
        op for op, total in zip(ordered, sums, strict=True) if total <= _OPERATIONS_OF_MINUTES
    )


def _count_rows(weight: Floats) -> int:
    """Return the number of rows of all samples that the moments are taken of."""
    return max(_LEAST_ROWS, _ROWS_PER_INPUT * weight.shape[2])


@dataclass
class Reconstruction(Generic[M]):
    """Reconstruction of the layers of a float model for a plan.

    Attributes:
        model: the model, with channels rescaled.
        ranges: quantized tensor → its range.
        corrected: the calibration data, and the weights made before.
    """

    model: M
    resolved: ResolvedPlan
    ranges: Mapping[str, Range]
    graph: OpGraph
    samples: int
    corrected: CorrectedWeights[M]
    #: Layer with an integer weight → the weight as rounded so far.
    _rounded: dict[str, LayerRescale] = field(default_factory=dict)

    def build_rounded_model(self) -> M:
        """Return the model with the rounded weights of the layers that the plan reconstructs.

        Raises:
            PlanError: there is no data, or a layer cannot be reconstructed.
            ConversionError: the framework does not return values of tensors.
        """
        ops = [op.name for op in self.graph if op.name in self._precision_plan]
        ops = [op for op in ops if self._precision_plan[op].is_reconstructed]
        if not ops:
            return self.model
        self._round_to_nearest()
        self._check_layers(ops)
        changes: dict[str, LayerRescale] = {}
        for stage in self._iterate_stages(ops):
            changes.update(self._run_stage(stage))
        return self._corrections_part.with_layer_params(self.model, changes)

    @property
    def _precision_plan(self) -> PrecisionPlan:
        return self.resolved.plan

    @cached_property
    def _layer_params(self) -> Mapping[str, LayerParams]:
        return self._corrections_part.layer_params(self.model)

    def _round_to_nearest(self) -> None:
        for op, config in self._precision_plan.items():
            layer = self._layer_params.get(op)
            spec = config.weight
            has_own_form = spec is not None and (spec.group_size is not None or spec.dtype.is_float)
            if config.precision is not Precision.INT8 or has_own_form or layer is None:
                continue
            if layer.inputs is not None:
                nearest = _round_layer_nearest(_make_weight_matrix(layer), config)
                self._rounded[op] = _make_layer_rescale(layer, nearest)

    @property
    def _corrections_part(self) -> Corrections[M]:
        adaptor = self.corrected.adaptor
        return require_part(adaptor.corrections, adaptor.framework, "constants of layers")

    def _check_layers(self, ops: Collection[str]) -> None:
        framework = self.corrected.adaptor.framework
        require_part(
            self._corrections_part.values, framework, "values of tensors for reconstruction"
        )
        for op in sorted(ops):
            layer, config = self._layer_params.get(op), self._precision_plan[op]
            name = next(name for name in config.corrections if name in RECONSTRUCTIONS)
            if layer is None or not layer.has_rows:
                raise PlanError(
                    f"correction {name!r} requires a convolution or dense layer with a constant "
                    f"weight, unlike op {op!r} ({self.graph[op].type}); remove the correction"
                )
            if self.corrected.batches is None:
                raise PlanError(
                    f"correction {name!r} of op {op!r} requires calibration data; give calibration "
                    f"data, or remove the correction"
                )

    def _iterate_stages(self, ops: Collection[str]) -> Iterator[list[str]]:
        """Yield the layers of each pass, in the order of the graph."""
        sizes = {op: _FLOAT * _count_moments(self._layer_params[op]) for op in ops}
        count = -(-len(ops) // _PASSES)
        for part in split_portions(sizes, _MOMENT_BYTES):
            yield from (part[first : first + count] for first in range(0, len(part), count))

    def _run_stage(self, ops: list[str]) -> dict[str, LayerRescale]:
        """Return the rounded weights of the layers of a pass, and take them for further passes."""
        context = self._pass_context(ops)
        weights = {op: _make_weight_matrix(self._layer_params[op]) for op in ops}
        matrices = {op: weight.reshape(-1, weight.shape[2]) for op, weight in weights.items()}
        learned = self.corrected.load_reconstructed(matrices, _list_stored_specs(weights), context)
        if learned is None:
            learned = self._learn_pass(ops, weights)
            self.corrected.keep_reconstructed(learned, _list_stored_specs(weights), context)
        changes = {}
        for op, weight in weights.items():
            codes = learned[op].codes.astype(np.float32) - middle_code(_BITS)
            scales = learned[op].scales.reshape(*weight.shape[:2], 1)
            rounded = RoundedLayer(codes.reshape(weight.shape), scales)
            changes[op] = _make_layer_rescale(self._layer_params[op], rounded, learned[op].offsets)
        self._rounded.update(changes)
        return changes

    def _learn_pass(
        self, ops: list[str], weights: Mapping[str, Floats]
    ) -> dict[str, GroupedWeight]:
        """Return the learned weights of a pass; rounded to nearest from the time limit on."""
        started = time.perf_counter()
        limit = self.corrected.options.learning.limit
        sums = {} if limit.is_reached() else self._sum_moments(ops, weights)
        reading = (time.perf_counter() - started) / len(ops)
        learned = {}
        for op in ops:
            if limit.is_reached():
                nearest = _round_layer_nearest(weights[op], self._precision_plan[op])
                shift = np.zeros(weights[op].shape[:2], np.float32)
                learned[op] = _to_grouped_weight(nearest, shift)
            else:
                learned[op] = self._learn_layer(op, weights[op], sums[op], reading)
        logger.info(
            "Reconstructed %s in %.1f s", ", ".join(map(repr, ops)), time.perf_counter() - started
        )
        return learned

    def _learn_layer(
        self, op: str, weight: Floats, sums: MomentsOfRows, reading: float
    ) -> GroupedWeight:
        """Return the learned weight of a layer; `reading` is its share of the pass, in seconds."""
        began = time.perf_counter()
        config = self._precision_plan[op]
        best = nearest = _round_layer_nearest(weight, config)
        shift = np.zeros(weight.shape[:2], np.float32)
        if sums.rows:
            shifts = "bias_correction" in config.corrections and self._layer_params[op].shifts
            error = sums.compute_error(shifts)
            best = reconstruct_layer_weight(
                weight,
                _make_weight_grid(config),
                damp_error(error, weight),
                self.corrected.options.learning,
                rounding="adaround" in config.corrections,
                scales="learned_scale" in config.corrections,
            )
            shift = sums.compute_lost_mean(best.to_floats()) if shifts else shift
            self.corrected.layer_errors[op] = LayerErrors(
                compute_relative_error(error, nearest),
                compute_relative_error(error, best),
                time.perf_counter() - began + reading,
            )
        else:
            logger.warning(
                "calibration did not reach %r; its weight is rounded to nearest, give data that "
                "reaches it",
                op,
            )
        return _to_grouped_weight(best, shift)

    def _sum_moments(
        self, ops: list[str], weights: Mapping[str, Floats]
    ) -> dict[str, MomentsOfRows]:
        sums = {op: MomentsOfRows.zeros_like(weights[op]) for op in ops}
        readers: dict[str, list[str]] = {}
        for op in ops:
            readers.setdefault(self.graph[op].inputs[0], []).append(op)
        changed = self._corrections_part.with_layer_params(self.model, self._rounded)
        values, batches = self._corrections_part.values, self.corrected.batches
        assert values is not None
        assert batches is not None
        pairs = zip(
            values(self.model, batches(), readers.keys()),
            values(changed, batches(), readers.keys()),
            strict=True,
        )
        for part, ((name, exact), (changed_name, actual)) in enumerate(pairs):
            assert name == changed_name
            if self.corrected.options.learning.limit.is_reached():
                break
            samples = len(exact) if exact.ndim else 1
            share = samples / max(self.samples, samples)
            for op in readers[name]:
                layer = self._layer_params[op]
                most = max(1, int(np.ceil(_count_rows(_make_weight_matrix(layer)) * share)))
                rounded = self._round_kernel_input(op, actual)
                sums[op].add_rows(
                    weights[op],
                    *(layer.extract_rows(rows, most, part) for rows in (exact, rounded)),
                )
        return sums

    def _round_kernel_input(self, op: str, values: Array) -> Array:
        config, source = self._precision_plan[op], self.graph[op].inputs[0]
        if config.approach is Approach.DYNAMIC:
            return round_kernel_input(values, (float(values.min()), float(values.max())), 1)
        flow = self.resolved.flow
        if source not in flow.int8_reads.get(op, ()):
            return values
        span = self.ranges.get(flow.scale_owner[source])
        return (
            values
            if span is None
            else round_kernel_input(values, span, self._layer_params[op].axis)
        )

    def _pass_context(self, ops: list[str]) -> str:
        """Return all that the weights of a pass depend on, besides model, data and options."""
        plan, flow = self._precision_plan, self.resolved.flow
        lines = [f"{op} {config}" for op, config in plan.items() if config.rescales]
        last = {op.name: index for index, op in enumerate(self.graph)}[ops[-1]]
        for op in list(self.graph)[: last + 1]:
            if op.name in plan:
                owners = [flow.scale_owner[name] for name in flow.int8_reads.get(op.name, ())]
                spans = [
                    (span, getattr(span, "channels", ()))
                    for name in owners
                    if (span := self.ranges.get(name)) is not None
                ]
                lines.append(f"{op.name} {plan[op.name]!r} {spans}")
        return "\n".join([*lines, *ops])


def _make_weight_matrix(layer: LayerParams) -> Floats:
    """Return the weight of a layer as [groups, outputs, inputs · taps]."""
    matrix = layer.as_matrix()
    return np.ascontiguousarray(matrix.reshape(*matrix.shape[:2], -1))


def _count_moments(layer: LayerParams) -> int:
    groups, outputs, inputs = _make_weight_matrix(layer).shape
    return groups * inputs * (inputs + outputs)


def _make_weight_grid(config: OpConfig) -> WeightGrid:
    per_channel = config.weight is None or config.weight.granularity is not Granularity.PER_TENSOR
    return WeightGrid(weight_qmax(config.weight), per_channel)


def _round_layer_nearest(weight: Floats, config: OpConfig) -> RoundedLayer:
    grid = _make_weight_grid(config)
    return grid.round_to_nearest(weight, grid.full_range_scales(weight))


def _make_layer_rescale(
    layer: LayerParams, rounded: RoundedLayer, shift: Floats | None = None
) -> LayerRescale:
    matrix = layer.as_matrix()
    weight = layer.like_weight(rounded.to_floats().reshape(matrix.shape))
    shift = None if shift is None or not shift.any() else shift.reshape(-1)
    return LayerRescale(rounded=weight, shift=shift)


def _list_stored_specs(weights: Mapping[str, Floats]) -> dict[str, QuantSpec]:
    """Return the quantizations that describe kept weights: one group per output."""
    whole = QuantSpec(
        QuantDType.INT8,
        Scheme.SYMMETRIC,
        Granularity.PER_GROUP,
        CalibrationAlgorithm.MINMAX,
        group_size=1,
    )
    return {op: replace(whole, group_size=weight.shape[2]) for op, weight in weights.items()}


def _to_grouped_weight(rounded: RoundedLayer, shift: Floats) -> GroupedWeight:
    """Return a rounded weight as it is kept; the shift of the bias is in place of offsets."""
    groups, outputs, inputs = rounded.codes.shape
    codes = (rounded.codes + middle_code(_BITS)).astype(np.uint8).reshape(-1, inputs)
    scales = np.ascontiguousarray(rounded.scales, np.float32).reshape(groups * outputs, 1)
    return GroupedWeight(CodedGroups(codes, scales, shift.reshape(scales.shape)), inputs, _BITS)


#: Fraction of every input's power that is added to the moments, against noise.
_DAMPING = 0.01


@dataclass
class MomentsOfRows:
    """Sums over the rows that a layer read, exact and rounded.

    All are taken around the means of the first rows: of inputs that hardly vary, the squares alone
    would leave nothing but rounding errors.
    """

    products: Floats
    targets: Floats
    power: Floats
    inputs: Floats
    results: Floats
    rows: int = 0
    #: Means of the first rows: of inputs [groups, inputs] and of results [groups, outputs].
    origins: tuple[Floats, Floats] | None = None

    @classmethod
    def zeros_like(cls, weight: Floats) -> MomentsOfRows:
        """Return the sums of no rows."""
        groups, outputs, inputs = weight.shape
        return cls(
            np.zeros((groups, inputs, inputs), np.float32),
            np.zeros((groups, outputs, inputs), np.float32),
            np.zeros((groups, outputs), np.float32),
            np.zeros((groups, inputs), np.float32),
            np.zeros((groups, outputs), np.float32),
        )

    def add_rows(self, weight: Floats, exact: Floats, actual: Floats) -> None:
        """Add rows [groups, rows, inputs]."""
        if not exact.shape[1]:
            return
        results = exact @ weight.swapaxes(1, 2)
        if self.origins is None:
            self.origins = actual.mean(axis=1), results.mean(axis=1)
        actual, results = (
            rows - origin[:, None]
            for rows, origin in zip((actual, results), self.origins, strict=True)
        )
        self.products += actual.swapaxes(1, 2) @ actual
        self.targets += results.swapaxes(1, 2) @ actual
        self.power += np.einsum("gro,gro->go", results, results)
        self.inputs += actual.sum(axis=1)
        self.results += results.sum(axis=1)
        self.rows += exact.shape[1]

    def compute_error(self, centered: bool) -> LayerError:
        """Return the mean squared error of the rows; `centered` without that of the means."""
        rows = np.float32(self.rows)
        inputs, results = self.inputs / rows, self.results / rows
        result = LayerError(
            self.products / rows - inputs[:, :, None] * inputs[:, None],
            self.targets / rows - results[:, :, None] * inputs[:, None],
            self.power / rows - results**2,
        )
        if centered:
            return result
        inputs, results = self._input_result_means()
        return LayerError(
            result.products + inputs[:, :, None] * inputs[:, None],
            result.targets + results[:, :, None] * inputs[:, None],
            result.power + results**2,
        )

    def _input_result_means(self) -> tuple[Floats, Floats]:
        assert self.origins is not None
        rows, (inputs, results) = np.float32(self.rows), self.origins
        return inputs + self.inputs / rows, results + self.results / rows

    def compute_lost_mean(self, weight: Floats) -> Floats:
        """Return the mean error of the results, [groups, outputs]."""
        inputs, results = self._input_result_means()
        result: Floats = results - np.einsum("goi,gi->go", weight, inputs)
        return result


def damp_error(error: LayerError, weight: Floats) -> LayerError:
    """Return the error plus a small one for every weight that changes."""
    extra = _DAMPING * np.einsum("gii->gi", error.products)
    diagonal = np.arange(extra.shape[1])
    products = error.products.copy()
    products[:, diagonal, diagonal] += extra
    return LayerError(
        products,
        error.targets + weight * extra[:, None],
        error.power + (weight**2 * extra[:, None]).sum(axis=2),
    )


def compute_relative_error(error: LayerError, rounded: RoundedLayer) -> float:
    """Return the squared error of a layer's results relative to their squares."""
    total = float(error.power.sum())
    return float(error.evaluate_weight(rounded.to_floats()).sum()) / total if total > 0 else 0.0


def round_kernel_input(values: Array, span: Range, axis: int) -> Array:
    """Return an input as an integer kernel rounds it, given its range and its channel axis."""
    if isinstance(span, ChannelRange) and len(span.channels) == values.shape[axis]:
        params = [QuantParams.of(param) for param in span.channels]
        shape = [-1 if index == axis % values.ndim else 1 for index in range(values.ndim)]
        scale = np.array([param.scale for param in params], np.float32).reshape(shape)
        zero = np.array([param.zero_point for param in params], np.float32).reshape(shape)
    else:
        whole = QuantParams.of(span)
        scale, zero = np.asarray(whole.scale, np.float32), np.asarray(whole.zero_point, np.float32)
    codes = np.clip(np.rint(values / scale) + zero, 0, 255)
    return np.asarray((codes - zero) * scale, np.float32)
