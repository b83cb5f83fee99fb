"""Numerics of a model's layers in one pass, and the origin of NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from neural_mp.util.pytree import float_arrays


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
    def finite(self) -> bool:
        """Whether all values are finite."""
        return not (self.nan or self.inf)

    @property
    def trouble(self) -> str:
        """Name of the non-finite value: `NaN` or `Inf`."""
        return "NaN" if self.nan else "Inf"

    @classmethod
    def of(cls, values: object) -> ValueStats:
        """Return the statistics of all floating-point arrays in nested values."""
        extents = [cls._of_array(array) for array in float_arrays(values)]
        return cls(
            max((extent.peak for extent in extents), default=0.0),
            any(extent.nan for extent in extents),
            any(extent.inf for extent in extents),
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
        return self.outputs.finite and (self.loss is None or bool(np.isfinite(self.loss)))


@dataclass(frozen=True)
class NonFinite:
    """Origin of the first non-finite value.

    Attributes:
        layer: the layer; None if outside of all layers.
        words: the event, as a sentence without a full stop.
        keep: whether the layer should stay in float32.
    """

    layer: str | None
    words: str
    keep: bool = False

    def __str__(self) -> str:
        return self.words


def first_non_finite(seen: ModelTrace) -> NonFinite | None:
    """Return the first non-finite value, forwards, then backwards; None if all are finite."""
    if seen.finite_forwards:
        return _first_backwards(seen.layers)
    if not seen.batch.finite:
        return NonFinite(None, f"the batch itself holds {seen.batch.trouble}")
    peak = seen.batch.peak
    for layer in seen.layers:
        if not layer.outputs.finite:
            return _forwards(layer, peak)
        peak = max(peak, layer.outputs.peak)
    if not seen.outputs.finite:
        return NonFinite(None, f"the outputs hold {seen.outputs.trouble}, though no layer makes it")
    return NonFinite(None, f"the loss is {seen.loss:g}, though all layers give finite numbers")


def _forwards(layer: LayerTrace, peak: float) -> NonFinite:
    """Return the cause of a layer's non-finite outputs; all before, up to `peak`, are finite."""
    if not layer.weights.finite:
        return NonFinite(layer.name, f"weights of {layer.title} hold {layer.weights.trouble}")
    if layer.inputs.finite:
        return NonFinite(layer.name, _turns(layer, layer.inputs, layer.outputs), _is_16(layer))
    if not _is_16(layer):  # no cast between given and read values
        trouble = layer.inputs.trouble
        words = f"code outside of the layers turns numbers of up to {peak:.3g} into {trouble}"
        return NonFinite(None, f"{words}, which {layer.title} is given")
    words = f"{layer.title} reads numbers of up to {peak:.3g}, which {layer.dtype} cannot hold"
    return NonFinite(layer.name, words, _is_16(layer))


def _first_backwards(layers: Sequence[LayerTrace]) -> NonFinite | None:
    """Return the layer that turns finite gradients into non-finite ones, innermost first."""
    for layer in _backwards(layers):
        above, below = layer.gradients_above, layer.gradients_below
        if above is not None and below is not None and above.finite and not below.finite:
            words = f"backwards, {_turns(layer, above, below, 'gradients')}"
            return NonFinite(layer.name, words, _is_16(layer))
    for layer in reversed(layers):
        above = layer.gradients_above
        if above is not None and not above.finite:
            words = (
                f"backwards, gradients are {above.trouble} already where they come to "
                f"{layer.title}: lower the loss scale, or look at the code behind this layer"
            )
            return NonFinite(None, words)
    return None


def _backwards(layers: Sequence[LayerTrace]) -> Iterable[LayerTrace]:
    for holds_layers in (False, True):
        yield from (layer for layer in reversed(layers) if layer.holds_layers is holds_layers)


def _turns(layer: LayerTrace, before: ValueStats, after: ValueStats, what: str = "inputs") -> str:
    return (
        f"{layer.title} turns {layer.dtype} {what} of at most {before.peak:.3g} into "
        f"{after.trouble}"
    )


def _is_16(layer: LayerTrace) -> bool:
    return layer.dtype in ("float16", "bfloat16")
