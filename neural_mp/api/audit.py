"""Auditing a result: its plan beside what the runtime says of a run."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core import hardware
from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import PlanError
from neural_mp.profiling.audit import Audit, judged
from neural_mp.space import PlannedOp, planned_by_name


def audited(model: AnyModel, plan: PrecisionPlan, planned: Mapping[str, PlannedOp]) -> Audit:
    """A model, run once on the inputs it was captured with, beside its plan.

    Args:
        model: the converted model.
        plan: what it was converted by.
        planned: what that comes down to for every op; empty where it is not known.

    Raises:
        PlanError: the plan says nothing of any op.
    """
    known = planned or planned_by_name(plan)
    if not known:
        raise PlanError("there is nothing to audit: the plan says nothing of any op")
    ran = model.adaptor.trace(model.held, model.example_inputs())
    here = hardware.detect()
    return judged(known, ran, lambda precision: here.support(precision).native, bool(planned))
