"""Rules that name one configuration for each op: by name, by type, or for all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.space.capability import FP32_ONLY, OpConstraint
from neural_mp.space.space import TuningSpace


@dataclass(frozen=True)
class ConversionRules:
    """The configuration of each op, as one constraint: the most specific rule counts.

    Names come before types, and types before the default. Among several names, the last one that
    matches counts.

    Attributes:
        defaults: pairs of op types or classes of layers, none for all, and the constraint of these
            ops; the last pair that matches an op counts. An op without rule stays in FP32.
        kept: patterns of names of ops that the defaults do not apply to.
        by_type: op type, or class of layers → constraint.
        by_name: pattern → constraint; the pattern must match the beginning of the name of an op or
            of one of its layers, or be one of its types.
    """

    defaults: tuple[tuple[frozenset[str], OpConstraint], ...] = ()
    kept: tuple[str, ...] = ()
    by_type: Mapping[str, OpConstraint] = field(default_factory=dict)
    by_name: Mapping[str, OpConstraint] = field(default_factory=dict)

    def constraint_for(self, op: Op) -> OpConstraint:
        """Return the constraint of an op."""
        named = [limit for pattern, limit in self.by_name.items() if _matches_op(pattern, op)]
        typed = [limit for kind, limit in self.by_type.items() if kind in op.types]
        usual = [limit for types, limit in self.defaults if not types or types & op.types]
        if any(_matches_op(pattern, op) for pattern in self.kept):
            usual = []
        return (named or typed or usual or [FP32_ONLY])[-1]

    def build_plan(self, space: TuningSpace) -> PrecisionPlan:
        """Return the plan with every op in the best configuration that its rule allows.

        An op without such a configuration stays in FP32.
        """
        limited = space.apply_op_constraints(
            {op.name: (self.constraint_for(op),) for op in space.graph}
        )
        return limited.fastest_plan()

    def find_unmatched(self, graph: OpGraph) -> tuple[str, ...]:
        """Return the names and types that match no op of a graph."""
        names = [p for p in self.by_name if not any(_matches_op(p, op) for op in graph)]
        types = {kind for op in graph for kind in op.types}
        return (*names, *(kind for kind in self.by_type if kind not in types))


def _matches_op(pattern: str, op: Op) -> bool:
    """Whether a pattern matches the beginning of a name of an op, or is one of its types."""
    names = (op.name, *(layer.name for layer in op.layers))
    return name_matches(pattern, names) or pattern in op.types


def name_matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern, or text that is none, matches the beginning of one of several names."""
    try:
        regex = re.compile(pattern)
    except re.error:
        regex = re.compile(re.escape(pattern))
    return any(regex.match(name) for name in names)
