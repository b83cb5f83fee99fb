"""Sensitivity of weights to rounding: Fisher probe of every form of storage, and HAWQ-V2 scores.

A sampled log-likelihood is differentiated by all weights, one sample at a time. Half the mean of
⟨gradient, rounded weight - weight⟩² is the divergence of the outputs to second order, as the Fisher
matrix is the mean outer product of these gradients (Amari, "Natural Gradient Works Efficiently in
Learning", 1998). The score of a weight is the divergence per prediction: per token of a language
model, in nats. One pass serves all layers and all forms, as far as their errors fit into memory.

Without gradients, the noise of a layer is the squared error of its results relative to their
square: of a weight W with the rounding error Δ, tr(ΔHΔᵀ) / tr(WHWᵀ), where H is the second moment
of its inputs, the Hessian of the squared error by a row of W (Frantar and Alistarh, "Optimal Brain
Compression", 2022). Both are computed on sampled inputs; a kernel that rounds its inputs to INT8
adds that error.

HAWQ-V2 scores follow from second derivatives: the trace of the Hessian of the loss.

Moments of the inputs of layers also yield corrections of weights.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import (
    Gradients,
    GroupedWeights,
    LayerInputs,
    StoredLayer,
    require_part,
)
from neural_mp.adaptors.common.quant_params import weight_limit_of
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights, split_portions
from neural_mp.adaptors.common.weights.cross_layer_scaling import round_int8_weight
from neural_mp.adaptors.common.weights.grouped_weight import (
    Floats,
    GroupedWeight,
    GroupParameters,
    InputMoments,
    input_group_size,
    round_grouped_inputs,
)
from neural_mp.core.enums import KernelInputs
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import TuningSpace
from neural_mp.util.pytree import Array, batch_size_of, sample_of
from neural_mp.util.token_masks import TokenMasks, find_token_masks

M = TypeVar("M")

#: Samples that are differentiated.
FISHER_SAMPLES = 48
#: Maximum bytes of rounding errors held at a time; more weights are scored in further passes.
_CHANGE_BYTES = 2 << 30
#: Rows of an input sampled from one part of a batch, and in total.
_ROWS_PER_PART, _ROWS = 32, 512
_TINY = 1e-30
#: Directions r at the outputs → op → squared norm of its gradient, |Jᵀr|².
Squares = Callable[[list[Array]], Mapping[str, float]]
#: Number of random directions at the outputs, averaged to estimate a trace.
DIRECTIONS = 8
_SIGNS = np.array([-1, 1], np.float32)
#: Rows of a triangle that are mirrored at a time, and columns that are summed.
_AT_ONCE = 128


def measure_weight_noise(
    adaptor: Framework[M],
    model: M,
    batches: Iterable[Any],
    space: TuningSpace,
    corrected: CorrectedWeights[M] | None = None,
) -> dict[str, dict[str, float]]:
    """Return op → text of the quantization of its weight → score of the rounding.

    Covers the ops whose weight can be stored in integers while their inputs stay float; of several
    corrections of one grid, the first. `corrected` are the corrected weights of the model.

    Raises:
        ConversionError: the framework has no gradients.
    """
    gradients = require_part(adaptor.gradients, adaptor.framework, "gradients of weights")
    weights = gradients.weights(model)
    specs = {op: list_float_input_specs(space, op) for op in space.tunable_ops if op in weights}
    corrected = _correct_weights(corrected or CorrectedWeights(adaptor, model), specs)
    samples = list(_iterate_first_samples(batches))
    scores: dict[str, dict[str, float]] = {}
    sizes = {op: weights[op].nbytes * len(op_specs) for op, op_specs in specs.items()}
    for part in split_portions(sizes, _CHANGE_BYTES):
        changes: dict[str, dict[str, NDArray[np.float32]]] = {op: {} for op in part}
        for op in part:
            for spec in specs[op]:
                changes[op][str(spec)] = (
                    corrected.restore_weight(op, weights[op], spec) - weights[op]
                )
        scores |= _score_changes(gradients, model, samples, changes)
    return scores


def _correct_weights(
    corrected: CorrectedWeights[M], specs: Mapping[str, Iterable[QuantSpec]]
) -> CorrectedWeights[M]:
    """Return corrected weights, made for all quantizations with corrections."""
    corrected.correct_weights(
        {op: [s for s in op_specs if s.corrections] for op, op_specs in specs.items()}
    )
    return corrected


def _score_changes(
    gradients: Gradients[M],
    model: M,
    samples: Iterable[Any],
    changes: Mapping[str, Mapping[str, NDArray[np.float32]]],
) -> dict[str, dict[str, float]]:
    """Return op → text of a quantization → score of the change of the weight.

    Every call draws the same directions.
    """
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    predictions, random = 0, np.random.default_rng(0)
    masks = TokenMasks({})

    def count_and_draw(outputs: Sequence[Array], are_logits: bool) -> list[Array]:
        nonlocal predictions
        directions = draw_direction(outputs, are_logits, random)
        if not are_logits:
            predictions += 1
            return directions
        for direction in directions:
            counted = masks.find_mask(direction.shape)
            if counted is not None:
                direction[~counted] = 0
            rows = direction.size // direction.shape[-1]
            predictions += rows if counted is None else int(counted.sum())
        return directions

    for sample in samples:
        masks = find_token_masks(sample)
        entries = gradients.weight_gradients(model, sample, list(changes), count_and_draw)
        for op, gradient in entries.items():
            for text, change in changes[op].items():
                sums[op, text] += float(np.vdot(gradient, change)) ** 2
    return {
        op: {text: sums[op, text] / max(2 * predictions, 1) for text in entries}
        for op, entries in changes.items()
    }


def list_float_input_specs(space: TuningSpace, op: str) -> tuple[QuantSpec, ...]:
    """Return the quantizations of an op's weight that leave its inputs in float.

    Of several corrections of one grid, the first.
    """
    specs: dict[QuantSpec, QuantSpec] = {}
    for config in space.capabilities[op].configs:
        if config.weight is not None and config.activation is None:
            specs.setdefault(config.weight.uncorrected, config.weight)
    return tuple(specs.values())


def draw_direction(
    outputs: Sequence[Array], are_logits: bool, random: np.random.Generator
) -> list[Array]:
    """Return the gradient of a sampled log-likelihood by the outputs.

    For logits, of a class drawn from their softmax at every position; for other outputs, of a
    normal distribution with unit variance: random signs.
    """
    if are_logits:
        return [_of_drawn_class(logits, random) for logits in outputs]
    return [random.choice(np.array([-1, 1], np.float32), np.shape(y)) for y in outputs]


def _of_drawn_class(logits: Array, random: np.random.Generator) -> Array:
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True), dtype=np.float64)
    chances = shifted / shifted.sum(axis=-1, keepdims=True)
    drawn = random.random((*chances.shape[:-1], 1))
    index = (np.cumsum(chances, axis=-1) < drawn).sum(axis=-1, keepdims=True)
    index = np.minimum(index, chances.shape[-1] - 1)
    gradient = -chances
    np.put_along_axis(gradient, index, np.take_along_axis(gradient, index, -1) + 1, -1)
    return gradient.astype(np.float32)


def _iterate_first_samples(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the first samples of batches, each as a batch of one."""
    remaining = FISHER_SAMPLES
    for batch in batches:
        for index in range(min(batch_size_of(batch), remaining)):
            yield sample_of(batch, index)
            remaining -= 1
        if remaining <= 0:
            return


def measure_layer_noise(
    adaptor: Framework[M],
    model: M,
    batches: Iterable[Any],
    space: TuningSpace,
    corrected: CorrectedWeights[M] | None = None,
) -> dict[str, dict[str, float]]:
    """Return op → text of the quantization of its weight → relative noise of its results.

    Covers the ops whose weight can be stored in integers while their inputs stay float; without
    those whose inputs calibration does not reach. `corrected` are the corrected weights of the
    model.

    Raises:
        ConversionError: the framework does not return the inputs of layers.
    """
    offered = require_part(adaptor.layer_inputs, adaptor.framework, "inputs of layers")
    layers = {
        op: layer
        for op, layer in offered.layers(model).items()
        if list_float_input_specs(space, op)
    }
    specs = {op: list_float_input_specs(space, op) for op in layers}
    corrected = _correct_weights(corrected or CorrectedWeights(adaptor, model), specs)
    tensors = {layer.read for layer in layers.values() if layer.read is not None}
    rows = _sample_rows(offered.values(model, batches, tensors)) if tensors else {}
    return {
        op: dict(_score_specs(op, layer, rows.get(layer.read or ""), specs[op], corrected))
        for op, layer in layers.items()
        if layer.read is None or layer.read in rows
    }


def _sample_rows(values: Iterable[tuple[str, Array]]) -> dict[str, Floats]:
    """Return tensor → evenly spread rows [rows, inputs] of its values."""
    parts: dict[str, list[Floats]] = {}
    counts: dict[str, int] = {}
    for name, array in values:
        rows = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
        count = min(_ROWS_PER_PART, _ROWS - counts.get(name, 0), len(rows))
        if count > 0:
            indices = np.linspace(0, len(rows) - 1, count).astype(np.int64)
            # A copy: arrays of a run may be overwritten by the next.
            parts.setdefault(name, []).append(np.array(rows[indices], np.float32))
            counts[name] = counts.get(name, 0) + count
        elif min(counts.values(), default=_ROWS) >= _ROWS:
            break
    return {name: np.concatenate(rows) for name, rows in parts.items()}


def _score_specs(
    op: str,
    layer: StoredLayer,
    rows: Floats | None,
    specs: Iterable[QuantSpec],
    corrected: CorrectedWeights[Any],
) -> Iterator[tuple[str, float]]:
    """Yield the text of each quantization and its noise; without rows, that of the weight."""
    weight = np.asarray(layer.weight(), np.float32)
    truth = weight if rows is None else rows @ weight.T
    signal = max(float(np.vdot(truth, truth)), _TINY)
    for spec in specs:
        output = (
            corrected.restore_weight(op, weight, spec)
            if rows is None
            else _compute_kernel_output(rows, op, weight, spec, corrected)
        )
        error = output - truth
        yield str(spec), float(np.vdot(error, error)) / signal


def _compute_kernel_output(
    rows: Floats, op: str, weight: Floats, spec: QuantSpec, corrected: CorrectedWeights[Any]
) -> Floats:
    if spec.inputs is not KernelInputs.INT8:
        return rows @ corrected.restore_weight(op, weight, spec).T
    size = input_group_size(spec, weight.shape[1])
    if spec.group_size is None:
        return round_grouped_inputs(rows, size) @ corrected.restore_weight(op, weight, spec).T
    stored = corrected.get_grouped_weight(op, weight, spec)
    scaled = rows if stored.input_factors is None else rows * stored.input_factors
    return round_grouped_inputs(scaled, size) @ stored.stored_floats().T


def estimate_weight_sensitivity(
    adaptor: Framework[M], model: M, batches: Iterable[Any], space: TuningSpace
) -> dict[str, float]:
    """Return op with an INT8 weight → sensitivity to rounding the weight.

    Dong et al., "HAWQ-V2: Hessian Aware trace-Weighted Quantization", 2020, equation 9: the mean of
    the Hessian's diagonal by the weight, times the squared distance of the weight from its
    rounding. The loss is half the squared distance of the outputs from their FP32 values, so no
    labels are needed; at its minimum, its Hessian is JᵀJ.

    Raises:
        ConversionError: the framework has no gradients.
    """
    if not adaptor.offers("hessian_traces"):
        adaptor.hessian_traces(model, batches, ())  # refuses before anything is computed
    layers = require_part(adaptor.corrections, adaptor.framework, "weights of layers").layer_params(
        model
    )
    ops = [op for op in space.tunable_ops if op in layers and op in space.int8_ops]
    sensitivity = {}
    for op, trace in adaptor.hessian_traces(model, batches, ops).items():
        matrix = layers[op].as_matrix().astype(np.float64)
        rounded = round_int8_weight(matrix, weight_limit_of(space, op))
        distance = float(np.square(matrix - rounded).sum())
        sensitivity[op] = trace / matrix.size * distance
    return sensitivity


def estimate_summed_traces(
    ops: Iterable[str], batches: Iterable[tuple[Sequence[Sequence[int]], Squares]]
) -> dict[str, float]:
    """Return op → trace of JᵀJ by its weight, summed over batches (Hutchinson's estimator).

    A batch is the shapes of its outputs and a function of directions at the outputs.
    """
    traces = dict.fromkeys(ops, 0.0)
    for shapes, squares in batches:
        for seed in range(DIRECTIONS if shapes else 0):
            random = np.random.default_rng(seed)
            signs = [random.choice(_SIGNS, tuple(shape)) for shape in shapes]
            for op, square in squares(signs).items():
                traces[op] += square / DIRECTIONS
    return traces


@dataclass
class MomentSums:
    """Sums over the rows that a layer read.

    Attributes:
        products: sums of x xᵀ, in the lower triangle.
        magnitudes: sums of |x|.
    """

    products: Floats
    magnitudes: Floats
    rows: int = 0

    @classmethod
    def of_size(cls, inputs: int) -> MomentSums:
        """Return the sums of no rows."""
        return cls(np.zeros((inputs, inputs), np.float32), np.zeros(inputs, np.float32))

    def add_inputs(self, values: Array) -> None:
        """Add values whose last axis is that of the inputs.

        Rows with NaN or Inf, e.g. of padding that is masked later, are left out.
        """
        from scipy.linalg import blas  # the import takes a tenth of a second

        rows = np.ascontiguousarray(values, np.float32).reshape(-1, len(self.magnitudes))
        if not np.isfinite(rows.sum()):
            rows = rows[np.isfinite(rows).all(axis=1)]
        if not rows.size:
            return
        # One triangle, added in place: the product alone would be as large as the sums.
        blas.ssyrk(1.0, rows.T, beta=1.0, c=self.products.T, overwrite_c=1)
        for first in range(0, rows.shape[1], _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            self.magnitudes[part] += np.abs(rows[:, part]).sum(axis=0)
        self.rows += len(rows)

    def finish_moments(self) -> InputMoments:
        """Return the mean over the rows, in the memory of the sums; to be called once."""
        rows = np.float32(max(self.rows, 1))
        self.products /= rows
        size = len(self.products)
        for first in range(0, size, _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            corner = np.tril(self.products[part, part])
            self.products[part, part] = corner + np.tril(corner, -1).T
            self.products[part, part.stop :] = self.products[part.stop :, part].T
        self.magnitudes /= rows
        return InputMoments(self.products, self.magnitudes)


def build_weight_corrections(
    inputs: LayerInputs[M], with_weights: Callable[[M, Mapping[str, GroupedWeight]], M]
) -> GroupedWeights[M]:
    """Return the corrections of weights for kernels that read integer zero points.

    `with_weights` is as in `GroupedWeights`.
    """

    def measure_moments(
        model: M, batches: Iterable[Any], ops: Collection[str]
    ) -> dict[str, InputMoments]:
        layers = inputs.layers(model)
        sources = {op: layers[op].read for op in ops}
        tensors = {tensor for tensor in sources.values() if tensor is not None}
        sums: dict[str, MomentSums] = {}
        masked = _MaskedBatches(batches)
        for tensor, values in inputs.values(model, masked, tensors):
            if tensor not in sums:
                sums[tensor] = MomentSums.of_size(values.shape[-1])
            sums[tensor].add_inputs(masked.select_counted_rows(tensor, values))
        tensor_moments = {tensor: total.finish_moments() for tensor, total in sums.items()}
        return {
            op: tensor_moments[tensor] for op, tensor in sources.items() if tensor in tensor_moments
        }

    return GroupedWeights(
        lambda model: _Read({op: layer.weight for op, layer in inputs.layers(model).items()}),
        measure_moments,
        with_weights,
        GroupParameters.ZERO_POINTS,
    )


@dataclass
class _MaskedBatches:
    """Batches, read one by one, and the rows of tensors whose tokens count in the last one."""

    batches: Iterable[Any]
    masks: TokenMasks = field(default_factory=lambda: TokenMasks({}))
    #: Tensor → the number of texts of the batch whose values were read.
    texts: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.masks = find_token_masks(batch)
            self.texts.clear()
            yield batch

    def select_counted_rows(self, tensor: str, values: Array) -> Array:
        """Return the rows that count, of a part of the texts; parts follow one another."""
        mask = self.masks.find_part(values.shape, self.texts[tensor])
        self.texts[tensor] += values.shape[0]
        return values if mask is None else values[mask]


@dataclass(frozen=True)
class _Read(Mapping[str, Array]):
    """Weights that are read when accessed, so that only one is held."""

    readers: Mapping[str, Callable[[], Array]]

    def __getitem__(self, op: str) -> Array:
        return np.asarray(self.readers[op](), np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)
