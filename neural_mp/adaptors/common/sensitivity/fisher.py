"""Sensitivity of outputs to the rounding of each weight, for every form of storage: Fisher probe.

A sampled log-likelihood is differentiated by all weights, one sample at a time. Half the mean of
⟨gradient, rounded weight - weight⟩² is the divergence of the outputs to second order, as the Fisher
matrix is the mean outer product of these gradients (Amari, "Natural Gradient Works Efficiently in
Learning", 1998). The score of a weight is the divergence per prediction: per token of a language
model, in nats. One pass serves all layers and all forms, as far as their errors fit into memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import Gradients, needed
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights, portions
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import TuningSpace
from neural_mp.util.pytree import Array, batch_size_of, sample_of

M = TypeVar("M")

#: Samples that are differentiated.
FISHER_SAMPLES = 48
#: Maximum bytes of rounding errors held at a time; more weights are scored in further passes.
_CHANGE_BYTES = 2 << 30


def weight_noise(
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
    gradients = needed(adaptor.gradients, adaptor.framework, "gradients of weights")
    weights = gradients.weights(model)
    specs = {op: specs_of(space, op) for op in space.tunable_ops if op in weights}
    corrected = corrected or CorrectedWeights(adaptor, model)
    corrected.of({op: [s for s in op_specs if s.corrections] for op, op_specs in specs.items()})
    samples = list(_first_samples(batches))
    scores: dict[str, dict[str, float]] = {}
    sizes = {op: weights[op].nbytes * len(op_specs) for op, op_specs in specs.items()}
    for part in portions(sizes, _CHANGE_BYTES):
        changes = {
            op: {
                str(spec): corrected.rounded(op, weights[op], spec) - weights[op]
                for spec in specs[op]
            }
            for op in part
        }
        scores |= _score_changes(gradients, model, samples, changes)
    return scores


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

    def draw_direction(outputs: Sequence[Array], are_logits: bool) -> list[Array]:
        nonlocal predictions
        predictions += sum(y.size // y.shape[-1] for y in outputs) if are_logits else 1
        return direction(outputs, are_logits, random)

    for sample in samples:
        entries = gradients.weight_gradients(model, sample, list(changes), draw_direction)
        for op, gradient in entries.items():
            for text, change in changes[op].items():
                sums[op, text] += float(np.vdot(gradient, change)) ** 2
    return {
        op: {text: sums[op, text] / max(2 * predictions, 1) for text in entries}
        for op, entries in changes.items()
    }


def specs_of(space: TuningSpace, op: str) -> tuple[QuantSpec, ...]:
    """Return the quantizations of an op's weight that leave its inputs in float.

    Of several corrections of one grid, the first.
    """
    specs: dict[QuantSpec, QuantSpec] = {}
    for config in space.capabilities[op].configs:
        if config.weight is not None and config.activation is None:
            specs.setdefault(config.weight.uncorrected, config.weight)
    return tuple(specs.values())


def direction(
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


def _first_samples(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the first samples of batches, each as a batch of one."""
    remaining = FISHER_SAMPLES
    for batch in batches:
        for index in range(min(batch_size_of(batch), remaining)):
            yield sample_of(batch, index)
            remaining -= 1
        if remaining <= 0:
            return
