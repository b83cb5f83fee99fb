"""`basic`: everything low, then fall back by type, then op by op, until the target is met."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace

from neural_mp.amp import AmpList
from neural_mp.core.enums import CalibrationAlgorithm
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, RANGE_ALGORITHMS, OpConfig, Precision
from neural_mp.core.trial import Trial
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem


@dataclass(frozen=True)
class FallbackGroup:
    """Ops that fall back together, and those among them that only wrote the shared tensor."""

    ops: frozenset[str]
    producers: frozenset[str] = frozenset()
    noise: float = 0.0


class Basic(Strategy):
    """The strategy Intel Neural Compressor calls `basic`, on quantized tensors instead of ops.

    1. All ops as low as they can, with each calibration algorithm in turn.
    2. Of what fails, one op type after the other back to a higher precision.
    3. Op by op in order of impact, accumulating; within the type that helped, if one did. Ops
       that share a quantized tensor fall back together, since one alone changes nothing.
    4. When that met the target, what brought nothing on the way is lowered again, and then the
       ops that only wrote the shared tensors.

    Where all low meets the target and is slower than FP32, types fall back, and that is all.

    A plan that leaves nothing in a lower precision is never proposed: it is the model as it was.

    Steps 2 and 3 are tried with the 16-bit precision first, where one was asked for, then FP32.
    """

    name = "basic"

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        if not problem.space.resolve(problem.space.fastest_plan()).has_low_precision:
            return
        best, trial = yield from _try_algorithms(problem)
        if trial.meets_accuracy and not trial.met:
            for target in fallback_precisions(problem):
                if (yield from _by_type(problem, best, target)):
                    return
        elif not trial.met:
            yield from self.fall_back(problem, best)

    def fall_back(self, problem: TuningProblem, base: PrecisionPlan) -> Search:
        """Steps 2 to 4, from a plan that missed the target."""
        for target in fallback_precisions(problem):
            helped = yield from _by_type(problem, base, target)
            if not helped and (yield from _by_several_types(problem, base, target)):
                return
            found = yield from self.by_op(problem, base, helped, target)
            if found or helped:
                return

    def by_op(
        self,
        problem: TuningProblem,
        base: PrecisionPlan,
        helped: frozenset[str],
        target: Precision,
    ) -> Generator[list[PrecisionPlan], list[Trial], bool]:
        """Steps 3 and 4; whether the target was met.

        Args:
            problem: what is searched.
            base: the plan that missed the target.
            helped: the ops of the type whose fallback met it; none where no type did.
            target: the precision to fall back to.
        """
        units = fallback_groups(problem, base, helped)
        return (yield from op_by_op(problem, base, units, target))


def _try_algorithms(
    problem: TuningProblem,
) -> Generator[list[PrecisionPlan], list[Trial], tuple[PrecisionPlan, Trial]]:
    """The plan with all ops as low as they can that lost least, and its trial.

    No more are tried once one meets the target, however slow it is: algorithms do not differ there.
    """
    start = problem.space.fastest_plan()
    calibrated = [_with_algorithm(problem.space, start, a) for a in RANGE_ALGORITHMS]
    plans = dict.fromkeys(plan for plan in calibrated if plan is not None) or [start]
    tried = []
    for plan in plans:
        (trial,) = yield [plan]
        if trial.meets_accuracy:
            return plan, trial
        tried.append((plan, trial))
    return min(tried, key=lambda pair: pair[1].ranking_loss)


def _with_algorithm(
    space: TuningSpace, plan: PrecisionPlan, algorithm: CalibrationAlgorithm
) -> PrecisionPlan | None:
    """The plan with another calibration algorithm; None if no op offers it."""
    changes: dict[str, OpConfig] = {}
    offered = Precision.INT8 not in plan.counts()
    for op, config in plan.items():
        if config.activation is None:
            continue
        other = replace(config, activation=replace(config.activation, algorithm=algorithm))
        if other in space.capabilities[op].configs:
            changes[op] = other
            offered = True
    return plan.replacing(changes) if offered else None


def fallback_precisions(problem: TuningProblem) -> list[Precision]:
    """What ops fall back to: a 16-bit precision above the lowest, where asked for, then FP32."""
    between = [p for p in problem.precisions if p.is_16_bit]
    lowest = min(problem.precisions, key=lambda p: p.bits, default=Precision.FP32)
    return [*(p for p in between if p.bits > lowest.bits), Precision.FP32]


def at_precision(
    space: TuningSpace, plan: PrecisionPlan, ops: Iterable[str], target: Precision
) -> PrecisionPlan:
    """The plan with some ops in another precision, FP32 where they cannot run in the target.

    Those that run in the target only where the ops around them do follow these from now on.
    """
    changes: dict[str, OpConfig] = {}
    followers = set()
    for op in ops:
        choice = space.choice(op, target)
        if choice is None and space.capabilities[op].config(target) is not None:
            followers.add(op)
        changes[op] = choice or FP32
    return plan.replacing(changes).without(followers)


def lowered_ops(problem: TuningProblem, plan: PrecisionPlan) -> list[str]:
    """The decided ops that a plan has in a lower precision."""
    low = {op for op, config in plan.items() if config.precision is not Precision.FP32}
    return [op for op in problem.space.tunable_ops if op in low]


def _grouped(space: TuningSpace, ops: Iterable[str]) -> dict[str, list[str]]:
    """Op type → those of the ops that are of it."""
    by_type: dict[str, list[str]] = {}
    for op in ops:
        by_type.setdefault(space.graph[op].type, []).append(op)
    return by_type


def _by_type(
    problem: TuningProblem, base: PrecisionPlan, target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], frozenset[str]]:
    """One op type after the other: the ops of the first whose fallback meets the target, if any.

    Types that only follow others in 16 bits are among them.
    """
    space = problem.space
    by_type = _grouped(space, [*lowered_ops(problem, base), *_followers(problem, base, target)])
    for ops in sorted(by_type.values(), key=len):
        plan = at_precision(space, base, ops, target)
        if not space.resolve(plan).has_low_precision:
            continue
        (trial,) = yield [plan]
        if trial.met:
            return frozenset(ops)
    return frozenset()


def _by_several_types(
    problem: TuningProblem, base: PrecisionPlan, target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """All types that only follow, at once; those that need not go back one by one, if that met."""
    by_type = _grouped(problem.space, _followers(problem, base, target))
    if len(by_type) < 2:
        return False

    def without(types: Iterable[str]) -> PrecisionPlan:
        ops = [op for name in types for op in by_type[name]]
        return at_precision(problem.space, base, ops, target)

    raised = list(by_type)
    (trial,) = yield [without(raised)]
    if not trial.met:
        return False
    for name in sorted(by_type, key=lambda name: -len(by_type[name])):
        fewer = [other for other in raised if other != name]
        (trial,) = yield [without(fewer)]
        if trial.met:
            raised = fewer
    return True


def _followers(problem: TuningProblem, base: PrecisionPlan, target: Precision) -> list[str]:
    """The ops that a plan does not name, but that 16 bits spread to, and harm."""
    if target is not Precision.FP32:
        return []
    space, effective = problem.space, problem.space.resolve(base).effective
    return [
        op.name
        for op in space.graph
        if op.name not in base
        and effective[op.name].is_16_bit
        and space.lists[effective[op.name]].of(op.type) is AmpList.INFER
    ]


def fallback_groups(
    problem: TuningProblem, base: PrecisionPlan, helped: frozenset[str]
) -> list[FallbackGroup]:
    """What falls back as one, worst first; of what helped by type, only that."""
    low = set(lowered_ops(problem, base))
    units = []
    for tensor in problem.space.tensors:
        readers = frozenset(tensor.consumers) & low
        writer = frozenset(tensor.producers) & low
        if readers:
            noise = problem.observations.nsr.get(tensor.name, 0.0)
            units.append(FallbackGroup(readers | writer, writer - readers, noise))
    covered = {op for unit in units for op in unit.ops}
    units.extend(
        FallbackGroup(frozenset({op})) for op in problem.space.tunable_ops if op in low - covered
    )
    units.extend(FallbackGroup(frozenset({op})) for op in sorted(helped - low))
    kept = [unit for unit in units if not helped or unit.ops & helped]
    return sorted(kept, key=lambda unit: -unit.noise)


def op_by_op(
    problem: TuningProblem, base: PrecisionPlan, units: list[FallbackGroup], target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Raise one unit after the other, those before included; whether the target was met."""
    space = problem.space
    if not any(unit.noise for unit in units):
        units = yield from _ranked_by_trial(problem, base, units, target)
    plan, least_harm = base, float("inf")
    useful: list[FallbackGroup] = []
    for count, unit in enumerate(units, start=1):
        plan = at_precision(space, plan, unit.ops, target)
        if not space.resolve(plan).has_low_precision:
            # The last unit may be all that the useful ones lack.
            return (yield from _only_these(problem, base, [*useful, unit], units, target))
        (trial,) = yield [plan]
        if trial.ranking_loss < least_harm:
            useful.append(unit)
            least_harm = trial.ranking_loss
        if trial.met:
            if not (yield from _only_these(problem, base, useful, units[:count], target)):
                yield from _lower_producers(space, base, plan, units[:count])
            return True
    return False


def _only_these(
    problem: TuningProblem,
    base: PrecisionPlan,
    useful: list[FallbackGroup],
    raised: list[FallbackGroup],
    target: Precision,
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """With only those units raised that lessened the harm, then without their writers.

    Returns:
        Whether a plan tried here met the target.
    """
    plan = at_precision(problem.space, base, (op for unit in useful for op in unit.ops), target)
    fewer = len(useful) < len(raised) and problem.space.resolve(plan).has_low_precision
    if fewer:
        (trial,) = yield [plan]
        if not trial.met:
            return False
    lowered = yield from _lower_producers(problem.space, base, plan, useful)
    return fewer or lowered


def _ranked_by_trial(
    problem: TuningProblem, base: PrecisionPlan, units: list[FallbackGroup], target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], list[FallbackGroup]]:
    """Where calibration says nothing of impact: raise each unit alone and see."""
    harms = []
    for unit in units:
        plan = at_precision(problem.space, base, unit.ops, target)
        if not problem.space.resolve(plan).has_low_precision:
            harms.append(float("inf"))
            continue
        (trial,) = yield [plan]
        harms.append(trial.ranking_loss)
        if trial.met:
            return [unit]
    order = sorted(range(len(units)), key=harms.__getitem__)
    return [units[index] for index in order]


def _lower_producers(
    space: TuningSpace, base: PrecisionPlan, plan: PrecisionPlan, raised: list[FallbackGroup]
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Lower again what only wrote the tensors that are now float, in one try; whether it met."""
    readers = {op for unit in raised for op in unit.ops - unit.producers}
    writers = {op for unit in raised for op in unit.producers} - readers
    if not writers:
        return False
    (trial,) = yield [plan.replacing({op: base[op] for op in writers})]
    return trial.met
