"""`basic`: everything low, then fall back by type, then op by op, until the target is met."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace

from neural_mp.plan import PrecisionPlan
from neural_mp.precision import FP32, QUANT_CHOICES, OpConfig, Precision
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem, fastest_plan
from neural_mp.trial import Trial

#: One step of the search: a plan out, its trial in; returns what the step found.
Step = Generator[list[PrecisionPlan], list[Trial], Trial]


@dataclass(frozen=True)
class _Unit:
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

    A plan that leaves nothing in a lower precision is never proposed: it is the model as it was.

    Steps 2 and 3 are tried with the 16-bit precision first, where one was asked for, then FP32.
    """

    name = "basic"

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        best = yield from _try_algorithms(problem)
        if best.met:
            return
        for target in _fallback_precisions(problem):
            helped = yield from _by_type(problem, best.plan, target)
            units = _units(problem, best.plan)
            if helped is not None:
                units = [unit for unit in units if unit.ops & helped]
            found = yield from _op_by_op(problem, best.plan, units, target)
            if found or helped is not None:
                return


def _try_algorithms(problem: TuningProblem) -> Step:
    start = fastest_plan(problem)
    best: Trial | None = None
    for algorithm in QUANT_CHOICES["algorithm"]:
        plan = _with_algorithm(problem.space, start, algorithm)
        if plan is None:
            continue
        (trial,) = yield [plan]
        if best is None or trial.harm < best.harm:
            best = trial
        if trial.met or Precision.INT8 not in plan.counts():
            break
    if best is None:
        (best,) = yield [start]
    return best


def _with_algorithm(
    space: TuningSpace, plan: PrecisionPlan, algorithm: str
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


def _fallback_precisions(problem: TuningProblem) -> list[Precision]:
    between = [p for p in problem.precisions if p.is_16_bit]
    lowest = min(problem.precisions, key=lambda p: p.bits, default=Precision.FP32)
    return [*(p for p in between if p.bits > lowest.bits), Precision.FP32]


def _raised(
    space: TuningSpace, plan: PrecisionPlan, ops: Iterable[str], target: Precision
) -> PrecisionPlan:
    """The plan with some ops in a higher precision, FP32 where they cannot run in the target."""
    changes: Mapping[str, OpConfig] = {
        op: space.capabilities[op].config(target) or FP32 for op in ops
    }
    return plan.replacing(changes)


def _low(problem: TuningProblem, plan: PrecisionPlan) -> list[str]:
    return [op for op in problem.space.decided if plan[op].precision is not Precision.FP32]


def _by_type(
    problem: TuningProblem, base: PrecisionPlan, target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], frozenset[str] | None]:
    """One op type after the other: the ops of the first whose fallback meets the target."""
    space = problem.space
    by_type: dict[str, list[str]] = {}
    for op in _low(problem, base):
        by_type.setdefault(space.graph[op].type, []).append(op)
    for ops in sorted(by_type.values(), key=len):
        plan = _raised(space, base, ops, target)
        if not _low(problem, plan):
            continue
        (trial,) = yield [plan]
        if trial.met:
            return frozenset(ops)
    return None


def _units(problem: TuningProblem, base: PrecisionPlan) -> list[_Unit]:
    """What falls back as one, worst first."""
    low = set(_low(problem, base))
    units = []
    for tensor in problem.space.tensors:
        readers = frozenset(tensor.consumers) & low
        writer = frozenset(tensor.producers) & low
        if readers:
            noise = problem.observations.noise.get(tensor.name, 0.0)
            units.append(_Unit(readers | writer, writer - readers, noise))
    covered = {op for unit in units for op in unit.ops}
    units.extend(_Unit(frozenset({op})) for op in problem.space.decided if op in low - covered)
    return sorted(units, key=lambda unit: -unit.noise)


def _op_by_op(
    problem: TuningProblem, base: PrecisionPlan, units: list[_Unit], target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    space = problem.space
    if not any(unit.noise for unit in units):
        units = yield from _ranked_by_trial(problem, base, units, target)
    plan, least_harm = base, float("inf")
    useful: list[_Unit] = []
    for count, unit in enumerate(units, start=1):
        plan = _raised(space, plan, unit.ops, target)
        if not _low(problem, plan):
            # The last unit may be all that the useful ones lack.
            return (yield from _only_these(problem, base, [*useful, unit], units, target))
        (trial,) = yield [plan]
        if trial.harm < least_harm:
            useful.append(unit)
            least_harm = trial.harm
        if trial.met:
            if not (yield from _only_these(problem, base, useful, units[:count], target)):
                yield from _lower_producers(space, base, plan, units[:count])
            return True
    return False


def _only_these(
    problem: TuningProblem,
    base: PrecisionPlan,
    useful: list[_Unit],
    raised: list[_Unit],
    target: Precision,
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """With only those units raised that lessened the harm, then without their writers.

    Returns:
        Whether a plan tried here met the target.
    """
    plan = _raised(problem.space, base, (op for unit in useful for op in unit.ops), target)
    fewer = len(useful) < len(raised) and bool(_low(problem, plan))
    if fewer:
        (trial,) = yield [plan]
        if not trial.met:
            return False
    lowered = yield from _lower_producers(problem.space, base, plan, useful)
    return fewer or lowered


def _ranked_by_trial(
    problem: TuningProblem, base: PrecisionPlan, units: list[_Unit], target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], list[_Unit]]:
    """Where calibration says nothing of impact: raise each unit alone and see."""
    harms = []
    for unit in units:
        plan = _raised(problem.space, base, unit.ops, target)
        if not _low(problem, plan):
            harms.append(float("inf"))
            continue
        (trial,) = yield [plan]
        harms.append(trial.harm)
        if trial.met:
            return [unit]
    order = sorted(range(len(units)), key=harms.__getitem__)
    return [units[index] for index in order]


def _lower_producers(
    space: TuningSpace, base: PrecisionPlan, plan: PrecisionPlan, raised: list[_Unit]
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Lower again what only wrote the tensors that are now float, in one try; whether it met."""
    readers = {op for unit in raised for op in unit.ops - unit.producers}
    writers = {op for unit in raised for op in unit.producers} - readers
    if not writers:
        return False
    (trial,) = yield [plan.replacing({op: base[op] for op in writers})]
    return trial.met
