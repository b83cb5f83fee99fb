"""`conservative`: from FP32 down, one op type after the other, keeping what still passes."""

from __future__ import annotations

from collections import Counter

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import at_precision, lowered_ops
from neural_mp.strategies.decisions import Decision

#: What op types are called that have their turn first, in this order, in all frameworks' words.
_FIRST = ("conv", "matmul", "linear", "gemm", "dense")


class Conservative(Strategy):
    """The tuning that Intel Neural Compressor calls conservative, its quantization level 0.

    1. From FP32, all ops of one type into the lowest precision: convolutions, then matrix
       products, then the other types, those with most ops first.
    2. A type that still meets the accuracy target stays low; one that does not is FP32 again.
    3. So with every type, whatever became of those before.
    4. What is still in FP32 has another turn, type by type, in each 16-bit precision.

    Ops that read one quantized tensor move together, with the type among theirs that is first.
    Whether a plan is fast does not count on the way, since it may be so with the next type only.

    Source: `tuning_strategies.md`, "Conservative Tuning", and `strategy/conservative.py`, which
    leaves out all types but convolutions and products.
    """

    name = "conservative"

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        space = problem.space
        kept = PrecisionPlan(dict.fromkeys(space.tunable_ops, FP32))
        types = _decisions_by_type(space)
        tried: set[ResolvedPlan] = set()
        for precision in space.usable_precisions:
            if precision is Precision.FP32:
                continue
            for decisions in types:
                plan = at_precision(space, kept, _open(problem, kept, decisions), precision)
                resolved = space.resolve(plan)
                if resolved in tried or not resolved.has_low_precision:
                    continue
                tried.add(resolved)
                (trial,) = yield [plan]
                if trial.meets_accuracy:
                    kept = plan


def _decisions_by_type(space: TuningSpace) -> list[list[Decision]]:
    """The decisions of each op type, in the order of their turns."""
    counts = Counter(space.graph[op].type for op in space.tunable_ops)

    def turn(op_type: str) -> tuple[int, int, str]:
        words = op_type.lower()
        first = next((i for i, word in enumerate(_FIRST) if word in words), len(_FIRST))
        return first, -counts[op_type], op_type

    order = {op_type: index for index, op_type in enumerate(sorted(counts, key=turn))}
    by_type: list[list[Decision]] = [[] for _ in order]
    for ops in space.decision_groups:
        by_type[min(order[space.graph[op].type] for op in ops)].append(ops)
    return by_type


def _open(problem: TuningProblem, plan: PrecisionPlan, decisions: list[Decision]) -> list[str]:
    """The ops of those decisions that a plan has nothing of in a lower precision."""
    low = set(lowered_ops(problem, plan))
    return [op for ops in decisions if low.isdisjoint(ops) for op in ops]
