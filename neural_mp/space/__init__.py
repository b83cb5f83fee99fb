"""The tuning space: supported configurations of every op, user constraints, resolution of plans."""

from neural_mp.space.capability import (
    FP32_ONLY,
    Capability,
    Constraints,
    OpConstraint,
    QuantConstraint,
)
from neural_mp.space.plan_effects import (
    Departure,
    EffectiveOp,
    Reason,
    count_ineligible_reasons,
    explain_int8_choice,
    find_departures,
    list_effective_ops,
    peak_activation_bytes,
)
from neural_mp.space.resolution import ResolvedPlan
from neural_mp.space.space import (
    ConversionRules,
    TuningSpace,
    limit_to_reached,
    name_matches,
    without_non_finite,
)

__all__ = [
    "FP32_ONLY",
    "Capability",
    "Constraints",
    "ConversionRules",
    "Departure",
    "EffectiveOp",
    "OpConstraint",
    "QuantConstraint",
    "Reason",
    "ResolvedPlan",
    "TuningSpace",
    "count_ineligible_reasons",
    "explain_int8_choice",
    "find_departures",
    "limit_to_reached",
    "list_effective_ops",
    "name_matches",
    "peak_activation_bytes",
    "without_non_finite",
]
