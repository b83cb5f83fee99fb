"""Numerics of a model's layers in one pass, and the origin of NaN or Inf."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from neural_mp.util.pytree import list_float_arrays


@dataclass(frozen=True)
class ValueStats:
    """Magnitude and finiteness of values.

    Attributes:
        peak: largest finite magnitude; 0 if no value is finite.
        nan, inf: whether any value is NaN, or infinite.
    """

    peak: float = 0.0
    nan: bool = False
    inf: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.nan or self.inf)

    @property
    def non_finite(self) -> str:
        """Name of the non-finite value: `NaN` or `Inf`."""
        return "NaN" if self.nan else "Inf"

    @classmethod
    def from_values(cls, values: object) -> ValueStats:
        """Return the statistics of all floating-point arrays in nested values."""
        stats = [cls._of_array(array) for array in list_float_arrays(values)]
        return cls(
            max((stat.peak for stat in stats), default=0.0),
            any(stat.nan for stat in stats),
            any(stat.inf for stat in stats),
        )

    @classmethod
    def _of_array(cls, array: np.ndarray) -> ValueStats:
        finite = np.isfinite(array)
        if finite.all():
            return cls(float(np.abs(array).max(initial=0)))
        peak = float(np.abs(array[finite]).max(initial=0))
        return cls(peak, bool(np.isnan(array).any()), bool(np.isinf(array).any()))


@dataclass(frozen=True)
class LayerTrace:
    """One layer in one pass.

    Attributes:
        name, kind: the layer's name and class.
        dtype: compute type, such as `float16`.
        inputs, outputs, weights: statistics of the values; inputs as cast to the layer's dtype.
        gradients_above: gradients of the outputs; None if not computed.
        gradients_below: gradients of the inputs and weights; None if not computed.
        holds_layers: whether the layer contains layers.
    """

    name: str
    kind: str
    dtype: str
    inputs: ValueStats
    outputs: ValueStats
    weights: ValueStats = ValueStats()
    gradients_above: ValueStats | None = None
    gradients_below: ValueStats | None = None
    holds_layers: bool = False

    @property
    def title(self) -> str:
        """Name and class, for messages."""
        return f"{self.name!r} ({self.kind})"


@dataclass(frozen=True)
class ModelTrace:
    """A model in one pass.

    Attributes:
        batch: statistics of the inputs.
        outputs: statistics of the outputs.
        layers: the layers, in order of completion.
        loss: the loss; None for none.
    """

    batch: ValueStats
    outputs: ValueStats
    layers: Sequence[LayerTrace]
    loss: float | None = None

    @property
    def finite_forwards(self) -> bool:
        """Whether outputs and loss are finite; Inf inside may be intended, as in a mask."""
        return self.outputs.is_finite and (self.loss is None or bool(np.isfinite(self.loss)))


@dataclass(frozen=True)
class NonFinite:
    """Origin of the first non-finite value.

    Attributes:
        layer: the layer; None if outside of all layers.
        message: the event, as a sentence without a full stop.
        keep: whether the layer should stay in float32.
    """

    layer: str | None
    message: str
    keep: bool = False

    def __str__(self) -> str:
        return self.message


def first_non_finite(trace: ModelTrace) -> NonFinite | None:
    """Return the first non-finite value, forwards, then backwards; None if all are finite."""
    if trace.finite_forwards:
        return _first_backward_cause(trace.layers)
    if not trace.batch.is_finite:
        return NonFinite(None, f"the batch contains {trace.batch.non_finite}")
    peak = trace.batch.peak
    for layer in trace.layers:
        if not layer.outputs.is_finite:
            return _forward_cause(layer, peak)
        peak = max(peak, layer.outputs.peak)
    if not trace.outputs.is_finite:
        non_finite = trace.outputs.non_finite
        return NonFinite(
            None, f"the outputs contain {non_finite}, but the outputs of all layers do not"
        )
    return NonFinite(None, f"the loss is {trace.loss:g}, but the outputs of all layers are finite")


def _forward_cause(layer: LayerTrace, peak: float) -> NonFinite:
    """Return the cause of a layer's non-finite outputs; all before, up to `peak`, are finite."""
    if not layer.weights.is_finite:
        non_finite = layer.weights.non_finite
        return NonFinite(layer.name, f"the weights of {layer.title} contain {non_finite}")
    if layer.inputs.is_finite:
        return NonFinite(
            layer.name, _describe_non_finite(layer, layer.inputs, layer.outputs), _is_16(layer)
        )
    if not _is_16(layer):  # no cast between given and read values
        message = (
            f"code outside of the layers, before {layer.title}, turns values of at most "
            f"{peak:.3g} into {layer.inputs.non_finite}"
        )
        return NonFinite(None, message)
    message = f"{layer.title} reads values of up to {peak:.3g}, which overflow {layer.dtype}"
    return NonFinite(layer.name, message, _is_16(layer))


def _first_backward_cause(layers: Sequence[LayerTrace]) -> NonFinite | None:
    """Return the layer that turns finite gradients into non-finite ones, innermost first."""
    for layer in sorted(reversed(layers), key=lambda layer: layer.holds_layers):
        above, below = layer.gradients_above, layer.gradients_below
        if above is not None and below is not None and above.is_finite and not below.is_finite:
            message = f"backwards, {_describe_non_finite(layer, above, below, 'gradients')}"
            return NonFinite(layer.name, message, _is_16(layer))
    for layer in reversed(layers):
        above = layer.gradients_above
        if above is not None and not above.is_finite:
            message = (
                f"backwards, the gradients of the outputs of {layer.title} contain "
                f"{above.non_finite}; lower the loss scale, or check the code after this layer"
            )
            return NonFinite(None, message)
    return None


def _describe_non_finite(
    layer: LayerTrace, source: ValueStats, result: ValueStats, what: str = "inputs"
) -> str:
    return (
        f"{layer.title} turns {layer.dtype} {what} of at most {source.peak:.3g} into "
        f"{result.non_finite}"
    )


def _is_16(layer: LayerTrace) -> bool:
    return layer.dtype in ("float16", "bfloat16")
