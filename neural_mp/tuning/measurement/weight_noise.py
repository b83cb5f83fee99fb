"""Noise of weights at the outputs of a model, for frameworks without gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import weight_only
from neural_mp.core.quant_spec import QuantSpec


def at_outputs(
    noise: Mapping[str, Mapping[str, float]], measure: Callable[[PrecisionPlan], float | None]
) -> dict[str, dict[str, float]]:
    """Return the noise of weights at the results of their layers as noise at the outputs.

    To first order, the noise of all forms of a layer reaches the outputs with the same factor, so
    one measurement per layer suffices: that of its noisiest form. Layers that `measure` returns no
    noise for get the median factor.
    """
    factors = {}
    for op, scores in noise.items():
        text, most = max(scores.items(), key=lambda item: item[1])
        measured = measure(PrecisionPlan({op: weight_only(QuantSpec.parse(text))}))
        if measured is not None and most > 0:
            factors[op] = measured / most
    middle = median(factors.values()) if factors else 1.0
    return {
        op: {text: score * factors.get(op, middle) for text, score in scores.items()}
        for op, scores in noise.items()
    }
