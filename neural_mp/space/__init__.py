"""The tuning space: supported configurations of every op, user constraints, resolution of plans."""

from neural_mp.space.activation_memory import peak_activation_bytes
from neural_mp.space.calibrated_space import reached_by, without_non_finite
from neural_mp.space.capability import (
    FP32_ONLY,
    Capability,
    Constraints,
    OpConstraint,
    QuantConstraint,
)
from neural_mp.space.explanations import EffectiveOp, Reason, counted_reasons, planned_ops, why_int8
from neural_mp.space.resolution import ResolvedPlan
from neural_mp.space.rules import ConversionRules, name_matches
from neural_mp.space.space import TuningSpace

__all__ = [
    "FP32_ONLY",
    "Capability",
    "Constraints",
    "ConversionRules",
    "EffectiveOp",
    "OpConstraint",
    "QuantConstraint",
    "Reason",
    "ResolvedPlan",
    "TuningSpace",
    "counted_reasons",
    "name_matches",
    "peak_activation_bytes",
    "planned_ops",
    "reached_by",
    "why_int8",
    "without_non_finite",
]
