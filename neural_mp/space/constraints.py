"""What a user allows: of the whole model, of op types, of single ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from neural_mp.core.precision import OpConfig, Precision, QuantSpec


@dataclass(frozen=True)
class QuantConstraint:
    """The values a user allows for a quantized tensor; None allows all."""

    dtype: tuple[str, ...] | None = None
    scheme: tuple[str, ...] | None = None
    granularity: tuple[str, ...] | None = None
    algorithm: tuple[str, ...] | None = None

    def allows(self, spec: QuantSpec | None) -> bool:
        """Whether a config with this spec may be used."""
        if spec is None:
            return True
        return all(
            allowed is None or getattr(spec, name) in allowed
            for name, allowed in vars(self).items()
        )


@dataclass(frozen=True)
class OpConstraint:
    """What a user allows an op to run in.

    Attributes:
        precisions: the allowed precisions; None allows all.
        weight, activation: further limits on INT8 configs.
    """

    precisions: tuple[Precision, ...] | None = None
    weight: QuantConstraint = QuantConstraint()
    activation: QuantConstraint = QuantConstraint()

    @property
    def asks(self) -> tuple[Precision, ...]:
        """The 16-bit precisions that stand here in place of INT8."""
        named = self.precisions or ()
        return () if Precision.INT8 in named else tuple(p for p in named if p.is_16_bit)

    def allows(self, config: OpConfig) -> bool:
        """Whether a config may be used."""
        if self.precisions is not None and config.precision not in self.precisions:
            return False
        return self.weight.allows(config.weight) and self.activation.allows(config.activation)


@dataclass(frozen=True)
class Constraints:
    """A user's limits: on the whole model, on op types, on single ops (names or patterns)."""

    model_wise: OpConstraint = OpConstraint()
    optype_wise: Mapping[str, OpConstraint] = field(default_factory=dict)
    op_wise: Mapping[str, OpConstraint] = field(default_factory=dict)
