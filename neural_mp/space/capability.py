"""Capabilities of single ops, and user constraints on them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from neural_mp.core.enums import Approach
from neural_mp.core.hardware import ONLY_ACCELERATORS
from neural_mp.core.precision import FP32, OpConfig, Precision, make_weight_only
from neural_mp.core.quant_spec import QuantSpec


@dataclass(frozen=True)
class Capability:
    """The configurations that one op supports on this machine.

    Attributes:
        configs: best first; FP32 is always included, as the last.
        reasons: ineligible precision → reason.
        emulated: 16-bit precisions that this machine computes in FP32 and rounds.
        weights: quantization specs of the INT8 weight that a plan may request besides those in
            `configs`.
        kernels: names of FP32 kernels that a plan may request besides the framework's own.
    """

    configs: tuple[OpConfig, ...] = (FP32,)
    reasons: Mapping[Precision, str] = field(default_factory=dict)
    emulated: frozenset[Precision] = frozenset()
    weights: tuple[QuantSpec, ...] = ()
    kernels: tuple[str, ...] = ()

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The supported precisions, best first."""
        return tuple(dict.fromkeys(config.precision for config in self.configs))

    @property
    def int8_approaches(self) -> tuple[Approach, ...]:
        """The supported INT8 approaches, best first; empty if INT8 is ineligible."""
        candidates = [c.approach for c in self.configs if c.precision is Precision.INT8]
        return tuple(dict.fromkeys(approach for approach in candidates if approach is not None))

    def config(self, precision: Precision) -> OpConfig | None:
        """Return the best config of a precision; None if the precision is ineligible."""
        return next((c for c in self.configs if c.precision == precision), None)

    def refusal_reason(self, precision: Precision) -> str | None:
        """Return the reason for an ineligible precision; None if the precision is supported."""
        if self.config(precision) is not None:
            return None
        is_for_npus = precision is Precision.INT16
        otherwise = ONLY_ACCELERATORS if is_for_npus else "excluded by your constraints"
        return self.reasons.get(precision, otherwise)

    def without_precisions(self, precisions: Collection[Precision], reason: str) -> Capability:
        """Return the capability without some precisions, with a common reason."""
        removed = [precision for precision in self.precisions if precision in precisions]
        if not removed:
            return self
        configs = tuple(config for config in self.configs if config.precision not in removed)
        reasons = {**self.reasons, **dict.fromkeys(removed, reason)}
        return replace(self, configs=configs, reasons=reasons)

    def refusing_int8(self, reason: str) -> Capability:
        """Return the capability with a reason why INT8 is ineligible."""
        return replace(self, reasons={**self.reasons, Precision.INT8: reason})

    def accepts_config(self, config: OpConfig) -> bool:
        """Whether a plan may request a config; corrections are not checked."""
        if config.kernel:
            return config.kernel in self.kernels
        bare = replace(config, corrections=())
        if bare in self.configs:
            return True
        return bare.weight in self.weights and any(
            replace(bare, weight=c.weight) == c
            for c in self.configs
            if c.precision is bare.precision and c.weight is not None
        )

    def with_requested(self, limits: Collection[OpConstraint]) -> Capability:
        """Return the capability with the weights in groups that only limits of the user ask for."""
        low = [config for config in self.configs if config.precision.is_low_bit]
        if not low or any(_satisfies_limits(config, limits) for config in low):
            return self
        candidates = self.offered_configs[len(self.configs) :]
        requested = tuple(config for config in candidates if _satisfies_limits(config, limits))
        return replace(self, configs=(*self.configs[:-1], *requested, self.configs[-1]))

    @property
    def offered_configs(self) -> tuple[OpConfig, ...]:
        """The configs, and those with a weight in groups that a plan may request besides."""
        groups = (
            make_weight_only(spec)
            for spec in self.weights
            if spec.group_size and not spec.dtype.is_float
        )
        return (*self.configs, *groups)

    def with_exact_weight(self, config: OpConfig) -> OpConfig:
        """Return the config with a weight range that is exact here; unchanged if already exact."""
        if (
            config.precision is not Precision.INT8
            or config.weight is None
            or self.accepts_config(config)
        ):
            return config
        if config.weight.group_size is not None:
            return config  # groups have no range
        weights = (
            c.weight
            for c in self.configs
            if c.precision is Precision.INT8 and c.approach == config.approach
        )
        variants = (replace(config, weight=w) for w in weights if w and w.group_size is None)
        return next((variant for variant in variants if self.accepts_config(variant)), config)


def _satisfies_limits(config: OpConfig, limits: Iterable[OpConstraint]) -> bool:
    return all(limit.allows_config(config) for limit in limits)


@dataclass(frozen=True)
class QuantConstraint:
    """The values that a user allows for a quantized tensor; None allows all.

    `rounding` are texts as of `QuantSpec.rounding`, e.g. `awq gptq` or `rtn`.
    """

    dtype: tuple[str, ...] | None = None
    scheme: tuple[str, ...] | None = None
    granularity: tuple[str, ...] | None = None
    algorithm: tuple[str, ...] | None = None
    group_size: tuple[int, ...] | None = None
    rounding: tuple[str, ...] | None = None

    def allows_spec(self, spec: QuantSpec | None) -> bool:
        """Whether a config with this spec is allowed."""
        if spec is None:
            return True
        return all(
            allowed is None or getattr(spec, name) in allowed
            for name, allowed in vars(self).items()
        )

    def find_unmet_limits(self, specs: Iterable[QuantSpec | None]) -> tuple[str, ...]:
        """Return the names of the limits that no spec meets."""
        defined = [spec for spec in specs if spec is not None]
        return tuple(
            name
            for name, allowed in vars(self).items()
            if defined
            and allowed is not None
            and not any(getattr(s, name) in allowed for s in defined)
        )

    def without_limits(self, names: Iterable[str]) -> QuantConstraint:
        """Return the constraint without some limits."""
        return replace(self, **dict.fromkeys(names))


@dataclass(frozen=True)
class OpConstraint:
    """The configurations that a user allows for an op.

    Attributes:
        precisions: the allowed precisions; None allows all.
        weight, activation: further limits on INT8 configs.
        approaches: the allowed approaches to quantization; None allows all.
        is_lenient: whether limits that no config of an op meets are ignored for this op, as in INC.
    """

    precisions: tuple[Precision, ...] | None = None
    weight: QuantConstraint = QuantConstraint()
    activation: QuantConstraint = QuantConstraint()
    approaches: tuple[Approach, ...] | None = None
    is_lenient: bool = False

    @property
    def requested_precisions(self) -> tuple[Precision, ...]:
        """The 16-bit precisions that the constraint names in place of INT8."""
        named = self.precisions or ()
        return () if Precision.INT8 in named else tuple(p for p in named if p.is_16_bit)

    def allows_config(self, config: OpConfig) -> bool:
        """Whether a config is allowed."""
        if self.precisions is not None and config.precision not in self.precisions:
            return False
        if self.approaches is not None and config.approach not in (*self.approaches, None):
            return False
        return self.weight.allows_spec(config.weight) and self.activation.allows_spec(
            config.activation
        )

    def find_unmet_limits(self, configs: Iterable[OpConfig]) -> dict[str, tuple[str, ...]]:
        """Return `weight` and `activation` → names of the limits that no config meets."""
        offered = tuple(configs)
        return {
            "weight": self.weight.find_unmet_limits(config.weight for config in offered),
            "activation": self.activation.find_unmet_limits(
                config.activation for config in offered
            ),
        }

    def fit_to_configs(self, configs: Iterable[OpConfig]) -> OpConstraint:
        """Return the constraint for an op with these configs; see `is_lenient`."""
        if not self.is_lenient:
            return self
        bare = replace(self, weight=QuantConstraint(), activation=QuantConstraint())
        names = self.find_unmet_limits(filter(bare.allows_config, configs))
        return replace(
            self,
            weight=self.weight.without_limits(names["weight"]),
            activation=self.activation.without_limits(names["activation"]),
        )


FP32_ONLY = OpConstraint((Precision.FP32,))


@dataclass(frozen=True)
class Constraints:
    """User constraints on the whole model, on op types and on single ops (names or patterns)."""

    model_wise: OpConstraint = OpConstraint()
    optype_wise: Mapping[str, OpConstraint] = field(default_factory=dict)
    op_wise: Mapping[str, OpConstraint] = field(default_factory=dict)
