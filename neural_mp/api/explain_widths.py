"""Explanation of the widths of an op on an accelerator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api.targets import model_for_target, profile_of
from neural_mp.core import hardware
from neural_mp.core.graph import Op
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import FP32, OpConfig
from neural_mp.errors import ConfigurationError
from neural_mp.runs.report import Report
from neural_mp.space import TuningSpace, without_non_finite
from neural_mp.targets import FOLLOWING, TargetProfile, Widths
from neural_mp.util.string_enum import StringEnum

#: The row of an op that is not in integers.
FLOAT = "float"


class Decision(StringEnum):
    """Decision on a width of an op."""

    RUNS = "runs"
    OFFERED = "offered"
    NOT_OFFERED = "not offered"
    FOLLOWS = "follows"  #: the width is that of another op


@dataclass(frozen=True)
class WidthExplanation:
    """Reason for or against a width of an op.

    Attributes:
        decision: whether the op runs in the width.
        reason: explanation as text.
        sqnr_db: SQNR of the outputs in dB, if the tensors and the weight of the op alone are in the
            width; None if not measured.
    """

    decision: Decision
    reason: str
    sqnr_db: float | None = None


def explain_widths(
    model: AnyModel,
    op: str,
    target: str,
    plan: PrecisionPlan | str | Path | None = None,
    report: Report | None = None,
) -> tuple[Op, Mapping[str, WidthExplanation]]:
    """Explain for each width of an accelerator whether an op runs in it.

    Args:
        model: the model.
        op: name or pattern of an op or layer, as in `op_wise`; of a layer, its first op with a
            weight.
        target: the name or the path of a profile.
        plan: plan to explain, or the file of a plan; default: the plan of a search's first trial,
            with every op in its narrowest width.
        report: the report of the search that found the plan, with the noise that was measured.

    Returns:
        The op, and the widths, narrowest first, or `float` → explanation.

    Raises:
        ConfigurationError: the target is no accelerator, or the model cannot be written as ONNX.
        PlanError: the plan does not fit the model or the target.
        UnknownOperatorError: the model lacks the op.
    """
    profile = profile_of(target)
    if profile is None:
        raise ConfigurationError(
            f"target must be an accelerator, got the CPU {target!r}, which explain_op explains"
        )
    seen = model_for_target(model, profile)
    space = seen.adaptor.space(seen.held, hardware.detect())
    parsed, observations = load_plan_file(plan) if isinstance(plan, str | Path) else (plan, None)
    if observations is not None:
        space = without_non_finite(space, observations.non_finite)
    node = _find_op(space, op)
    resolved = space.resolve(space.fastest_plan() if parsed is None else parsed)
    figures = None if report is None else report.accelerator
    chooser = "search" if report is not None else "" if parsed is None else "plan"
    noise = {} if figures is None else figures.sqnr_db.get(node.name, {})
    current = resolved.plan.get(node.name, FP32)
    return node, _Explainer(profile, space, node, current, chooser, noise).explain_widths()


def _find_op(space: TuningSpace, pattern: str) -> Op:
    names = space.match_ops(pattern, "the op argument")
    weighted = (n for n in names if any(c.weight for c in space.capabilities[n].configs))
    return space.graph[next(weighted, names[0])]


@dataclass(frozen=True)
class _Explainer:
    """Explains the widths of one op.

    Attributes:
        current: the config of the op in the plan.
        chooser: author of the plan as a word: `search` or `plan`; empty without a plan.
        noise: widths → SQNR of the outputs with this op alone in these.
    """

    profile: TargetProfile
    space: TuningSpace
    op: Op
    current: OpConfig
    chooser: str
    noise: Mapping[str, float]

    def explain_widths(self) -> dict[str, WidthExplanation]:
        """Return the widths of the target, and `float` → explanation."""
        capability = self.space.capabilities[self.op.name]
        offered = [
            widths for c in capability.configs if (widths := Widths.from_config(c)) is not None
        ]
        kinds = offered or self.profile.widths_of(self.op.type)
        has_weight = any(widths.weight_bits for widths in kinds)
        searched = (w.value for w in offered if self.profile.is_searched(self.op.type, w))
        levels = [*searched, FLOAT]
        rows = {}
        for widths in self.profile.widths_of_kind(has_weight):
            refusal = capability.reasons.get(widths.precision)
            if widths in offered:
                explanation = self._explain_offered(widths.value, levels)
            elif refusal in FOLLOWING:
                explanation = WidthExplanation(Decision.FOLLOWS, refusal)
            else:
                unknown = f"{self.profile.title} does not compute {self.op.type} in {widths}"
                explanation = WidthExplanation(Decision.NOT_OFFERED, refusal or unknown)
            rows[widths.value] = explanation
        in_float = (
            self._explain_offered(FLOAT, levels) if offered else self._explain_float_only(rows)
        )
        return {**rows, FLOAT: in_float}

    def _explain_float_only(self, rows: Mapping[str, WidthExplanation]) -> WidthExplanation:
        """Explain the float row of an op that has no width of its own."""
        following = [row for row in rows.values() if row.decision is Decision.FOLLOWS]
        if following:
            return following[0]
        if self.op.type in self.profile.refuse:
            return WidthExplanation(
                Decision.NOT_OFFERED, f"the compiler of {self.profile.title} does not take the op"
            )
        return WidthExplanation(Decision.RUNS, "no width is offered")

    def _explain_offered(self, row: str, levels: Sequence[str]) -> WidthExplanation:
        """Explain one of the `levels` that a plan may choose, the narrowest first."""
        sqnr, chosen = self.noise.get(row), str(Widths.from_config(self.current) or FLOAT)
        if row not in levels:
            decision = Decision.RUNS if row == chosen else Decision.OFFERED
            return WidthExplanation(decision, "for plans alone: wider ones cost no more", sqnr)
        if row != chosen:
            return WidthExplanation(Decision.OFFERED, self._explain_other_width(row, chosen), sqnr)
        if row == levels[0]:
            reason = "the narrowest width offered"
            reason += "" if self.chooser else "; no plan was given"
            return WidthExplanation(Decision.RUNS, reason, sqnr)
        narrower = levels[levels.index(row) - 1]
        reason = f"widened by the {self.chooser}"
        if narrower in self.noise:
            loss = f"the outputs of the model lose to {self.noise[narrower]:.1f} dB"
            reason += f": in {narrower} {loss} by its {_name_quantized_parts(narrower)} alone"
        return WidthExplanation(Decision.RUNS, reason, sqnr)

    def _explain_other_width(self, row: str, chosen: str) -> str:
        if not self.chooser:
            return f"for a search that misses its target in {chosen}"
        reason = f"the {self.chooser} has {chosen}"
        if row not in self.noise:
            return reason
        outputs = f"the outputs of the model have {self.noise[row]:.1f} dB"
        return f"{reason}; with its {_name_quantized_parts(row)} alone in {row}, {outputs}"


def _name_quantized_parts(widths: str) -> str:
    return "tensors and weight" if Widths(widths).weight_bits else "tensors"
