"""What every op of a model may run in here, and what a plan comes down to."""

from neural_mp.space.capability import Capability
from neural_mp.space.constraints import Constraints, OpConstraint, QuantConstraint
from neural_mp.space.footprint import live_bytes
from neural_mp.space.planned import PlannedOp, planned_by_name, planned_ops
from neural_mp.space.resolution import ResolvedPlan
from neural_mp.space.space import TuningSpace

__all__ = [
    "Capability",
    "Constraints",
    "OpConstraint",
    "PlannedOp",
    "QuantConstraint",
    "ResolvedPlan",
    "TuningSpace",
    "live_bytes",
    "planned_by_name",
    "planned_ops",
]
