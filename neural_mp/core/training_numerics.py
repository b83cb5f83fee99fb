"""Numerics of training in 16 bits: traces with the origin of NaN or Inf, and loss scaling.

A trace is of one pass. Loss scaling acts against underflow of gradients, for all frameworks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from neural_mp.errors import ArgumentValueError
from neural_mp.util.pytree import list_float_arrays
from neural_mp.util.validators import (
    integer_between,
    is_finite,
    optional,
    positive_float,
    validate_option,
)

DYNAMIC = "dynamic"


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


@dataclass(frozen=True)
class LossScaleState:
    """State of loss scaling during training.

    Attributes:
        scale: factor of the loss and divisor of the gradients.
        good_steps: steps with finite gradients since the scale last changed.
        steps: steps that updated the weights.
        skipped_steps: steps skipped because of non-finite gradients.
        skipped_in_a_row: consecutive skipped steps up to now.
    """

    scale: float
    good_steps: int = 0
    steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class LossScale:
    """Schedule of the loss scale.

    The scale is divided by `factor` after every step with NaN or Inf gradients, and multiplied by
    `factor` after `growth_interval` finite steps. The scale never falls below `minimum`: a scale of
    0, reached after about 300 such steps without a minimum, turns the next finite gradients into
    NaN.

    Attributes:
        initial: initial scale.
        growth_interval: finite steps before an increase; None for a fixed scale.
        factor: factor of an increase or decrease.
        minimum, maximum: bounds of the scale. Real training runs need scales of 0.01.

    Raises:
        ConfigurationError: a number is out of bounds.
    """

    initial: float = 2.0**15
    growth_interval: int | None = 2000
    factor: float = 2.0
    minimum: float = 2.0**-14
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "minimum", "maximum"):
            value = getattr(self, name)
            validate_option(f"loss scale: {name}", positive_float, value, ArgumentValueError)
        validate_option(
            "loss scale: growth_interval",
            optional(integer_between(1)),
            self.growth_interval,
            ArgumentValueError,
        )
        if self.factor <= 1:
            raise ArgumentValueError(f"loss scale: factor must be above 1, got {self.factor!r}")
        if not self.minimum <= self.initial <= self.maximum:
            raise ArgumentValueError(
                f"loss scale: initial must be between minimum {self.minimum:g} and maximum "
                f"{self.maximum:g}, got {self.initial:g}"
            )

    @classmethod
    def fixed(cls, value: float) -> LossScale:
        """Return a fixed scale; steps with non-finite gradients are still skipped.

        Raises:
            ConfigurationError: the scale is below 1, which lets more gradients underflow.
        """
        if is_finite(value) and 0 < value < 1:
            raise ArgumentValueError(
                f"a fixed loss scale must be at least 1, got {value:g}; pass 'dynamic' or a "
                f"LossScale, whose scale may fall below 1"
            )
        return cls(value, None, minimum=value, maximum=value)

    @classmethod
    def read(cls, given: Any) -> LossScale:
        """Parse a user's value: `"dynamic"`, a number (fixed scale), or a `LossScale`.

        Raises:
            ConfigurationError: the value is none of these.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str) and given == DYNAMIC:
            return cls()
        if is_finite(given):
            return cls.fixed(float(given))
        raise ArgumentValueError(
            f"loss_scale must be {DYNAMIC!r}, a number or a LossScale, got {given!r}"
        )

    @property
    def is_fixed(self) -> bool:
        """Whether the scale never changes."""
        return self.growth_interval is None

    def start(self) -> LossScaleState:
        """Return the state before the first step."""
        return LossScaleState(self.initial)

    def after(self, state: LossScaleState, finite: bool) -> LossScaleState:
        """Return the state after a step; `finite`: whether all gradients were finite."""
        if not finite:
            scale = state.scale if self.is_fixed else max(state.scale / self.factor, self.minimum)
            skipped, in_a_row = state.skipped_steps + 1, state.skipped_in_a_row + 1
            return LossScaleState(scale, 0, state.steps, skipped, in_a_row)
        scale, good = state.scale, state.good_steps + 1
        if self.growth_interval is not None and good >= self.growth_interval:
            scale, good = min(scale * self.factor, self.maximum), 0
        return LossScaleState(scale, good, state.steps + 1, state.skipped_steps)
