"""`basic` and `auto_mixed_precision`: lowest precision first, then fallback by type and by op."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from math import inf

from neural_mp.amp import AmpList
from neural_mp.core.enums import CalibrationAlgorithm
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.core.trial import Trial
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem


@dataclass(frozen=True)
class FallbackGroup:
    """Ops that fall back together, and those among them that only produce the shared tensor."""

    ops: frozenset[str]
    producers: frozenset[str] = frozenset()
    noise: float = 0.0


class Basic(Strategy):
    """Intel Neural Compressor's `basic`, on quantized tensors instead of ops.

    1. All ops in their lowest precision, with each calibration algorithm.
    2. If these miss the target, one op type after the other falls back to a higher precision.
    3. Ops fall back cumulatively in order of impact; if a type helped in step 2, only its ops. Ops
       that share a quantized tensor fall back together, since a single one has no effect.
    4. If a plan of step 3 meets the target, ops whose fallback had no effect are lowered again,
       then the ops that only produce the shared tensors.

    If the plan of step 1 meets the accuracy target but is slower than FP32, only step 2 follows.

    A plan without any lower precision is never proposed, because the model would stay unchanged.

    Steps 2 and 3 fall back to a requested 16-bit precision first, then to FP32.
    """

    name = "basic"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        if not problem.space.resolve(problem.space.fastest_plan()).has_low_precision:
            return
        best, trial = yield from _try_algorithms(problem)
        if trial.meets_accuracy and not trial.met:
            for target in choose_fallback_precisions(problem):
                if (yield from _fall_back_by_type(problem, best, target)):
                    return
        elif not trial.met:
            yield from self.fall_back(problem, best)

    def fall_back(self, problem: TuningProblem, base: PrecisionPlan) -> Search:
        """Run steps 2 to 4, from a plan that missed the target."""
        for target in choose_fallback_precisions(problem):
            helped = yield from _fall_back_by_type(problem, base, target)
            if not helped and (yield from _by_several_types(problem, base, target)):
                return
            met = yield from self.by_op(problem, base, helped, target)
            if met or helped:
                return

    def by_op(
        self, problem: TuningProblem, base: PrecisionPlan, helped: frozenset[str], target: Precision
    ) -> Generator[list[PrecisionPlan], list[Trial], bool]:
        """Run steps 3 and 4, from a plan that missed the target; return whether a plan met it.

        `helped` holds the ops of the type whose fallback met the target, if any.
        """
        return (
            yield from op_by_op(problem, base, order_fallback_groups(problem, base, helped), target)
        )


def _try_algorithms(
    problem: TuningProblem,
) -> Generator[list[PrecisionPlan], list[Trial], tuple[PrecisionPlan, Trial]]:
    """Try all ops in their lowest precision; return the plan with the least loss, and its trial.

    Ends when an algorithm meets the accuracy target, even if slow: all are equally fast.
    """
    start = problem.space.fastest_plan()
    calibrated = [_replace_algorithm(problem.space, start, a) for a in RANGE_ALGORITHMS]
    plans = dict.fromkeys(plan for plan in calibrated if plan is not None) or [start]
    tried = []
    for plan in plans:
        (trial,) = yield [plan]
        if trial.meets_accuracy:
            return plan, trial
        tried.append((plan, trial))
    return min(tried, key=lambda pair: pair[1].ranking_loss)


def _replace_algorithm(
    space: TuningSpace, plan: PrecisionPlan, algorithm: CalibrationAlgorithm
) -> PrecisionPlan | None:
    """Return the plan with another calibration algorithm; None if no op supports it."""
    changes: dict[str, OpConfig] = {}
    offered = Precision.INT8 not in plan.counts()
    for op, config in plan.items():
        if config.activation is None:
            continue
        changed = replace(config, activation=replace(config.activation, algorithm=algorithm))
        if changed in space.capabilities[op].configs:
            changes[op] = changed
            offered = True
    return plan.replacing(changes) if offered else None


def choose_fallback_precisions(problem: TuningProblem) -> list[Precision]:
    """Return the precisions to fall back to: requested 16 bits above the lowest, then FP32."""
    between = [p for p in problem.precisions if p.is_16_bit]
    lowest = min(problem.precisions, key=lambda p: p.bits, default=Precision.FP32)
    return [*(p for p in between if p.bits > lowest.bits), Precision.FP32]


def set_op_precision(
    space: TuningSpace, plan: PrecisionPlan, ops: Iterable[str], target: Precision
) -> PrecisionPlan:
    """Return the plan with some ops in another precision, or in FP32 if it is ineligible.

    Ops that can only follow their neighbours into the target precision are removed from the plan.
    """
    changes: dict[str, OpConfig] = {}
    followers = set()
    for op in ops:
        choice = space.choice(op, target)
        if choice is None and space.capabilities[op].config(target) is not None:
            followers.add(op)
        changes[op] = choice or FP32
    return plan.replacing(changes).without(followers)


def list_lowered_ops(problem: TuningProblem, plan: PrecisionPlan) -> list[str]:
    """Return the tunable ops that a plan has in a lower precision."""
    low = {op for op, config in plan.items() if config.precision is not Precision.FP32}
    return [op for op in problem.space.tunable_ops if op in low]


def group_by_type(space: TuningSpace, ops: Iterable[str]) -> dict[str, list[str]]:
    """Return op type → its ops."""
    by_type: dict[str, list[str]] = {}
    for op in ops:
        by_type.setdefault(space.graph[op].type, []).append(op)
    return by_type


def _fall_back_by_type(
    problem: TuningProblem, base: PrecisionPlan, target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], frozenset[str]]:
    """Fall back one op type after the other; return the ops of the first that meets the target.

    Types that only follow others into 16 bits are included.
    """
    space = problem.space
    by_type = group_by_type(
        space, [*list_lowered_ops(problem, base), *_infer_list_followers(problem, base, target)]
    )
    for ops in sorted(by_type.values(), key=len):
        plan = set_op_precision(space, base, ops, target)
        if not space.resolve(plan).has_low_precision:
            continue
        (trial,) = yield [plan]
        if trial.met:
            return frozenset(ops)
    return frozenset()


def _by_several_types(
    problem: TuningProblem, base: PrecisionPlan, target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Fall back all following types at once; if that meets the target, lower each again."""
    by_type = group_by_type(problem.space, _infer_list_followers(problem, base, target))
    if len(by_type) < 2:
        return False

    def raise_types(types: Iterable[str]) -> PrecisionPlan:
        ops = [op for name in types for op in by_type[name]]
        return set_op_precision(problem.space, base, ops, target)

    raised = list(by_type)
    (trial,) = yield [raise_types(raised)]
    if not trial.met:
        return False
    for name in sorted(by_type, key=lambda name: -len(by_type[name])):
        fewer = [op_type for op_type in raised if op_type != name]
        (trial,) = yield [raise_types(fewer)]
        if trial.met:
            raised = fewer
    return True


def _infer_list_followers(
    problem: TuningProblem, base: PrecisionPlan, target: Precision
) -> list[str]:
    """Return ops outside the plan that 16 bits spread to, by the INFER list."""
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


def order_fallback_groups(
    problem: TuningProblem, base: PrecisionPlan, helped: frozenset[str]
) -> list[FallbackGroup]:
    """Return the groups that fall back together, worst first; only the helpful ones, if any."""
    low = set(list_lowered_ops(problem, base))
    groups = []
    for tensor in problem.space.tensors:
        consumers = frozenset(tensor.consumers) & low
        producers = frozenset(tensor.producers) & low
        if consumers:
            noise = problem.observations.nsr.get(tensor.name, 0.0)
            groups.append(FallbackGroup(consumers | producers, producers - consumers, noise))
    covered = {op for group in groups for op in group.ops}
    single = [op for op in problem.space.tunable_ops if op in low - covered]
    groups.extend(FallbackGroup(frozenset({op})) for op in (*single, *sorted(helped - low)))
    selected = [group for group in groups if not helped or group.ops & helped]
    return sorted(selected, key=lambda group: -group.noise)


def op_by_op(
    problem: TuningProblem, base: PrecisionPlan, groups: list[FallbackGroup], target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Raise the groups cumulatively; return whether a plan met the target."""
    space = problem.space
    if not any(group.noise for group in groups):
        groups = yield from _ranked_by_trial(problem, base, groups, target)
    plan, least_loss = base, float("inf")
    useful: list[FallbackGroup] = []
    for count, group in enumerate(groups, start=1):
        plan = set_op_precision(space, plan, group.ops, target)
        if not space.resolve(plan).has_low_precision:
            # The last group may be the only one missing among the useful ones.
            return (
                yield from _raise_useful_groups(problem, base, [*useful, group], groups, target)
            )
        (trial,) = yield [plan]
        if trial.ranking_loss < least_loss:
            useful.append(group)
            least_loss = trial.ranking_loss
        if trial.met:
            if not (yield from _raise_useful_groups(problem, base, useful, groups[:count], target)):
                yield from _lower_producers(base, plan, groups[:count])
            return True
    return False


def _raise_useful_groups(
    problem: TuningProblem,
    base: PrecisionPlan,
    useful: list[FallbackGroup],
    raised: list[FallbackGroup],
    target: Precision,
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Raise only the useful groups, then lower their producers again; return whether a plan met."""
    plan = set_op_precision(
        problem.space, base, (op for group in useful for op in group.ops), target
    )
    fewer = len(useful) < len(raised) and problem.space.resolve(plan).has_low_precision
    if fewer:
        (trial,) = yield [plan]
        if not trial.met:
            return False
    lowered = yield from _lower_producers(base, plan, useful)
    return fewer or lowered


def _ranked_by_trial(
    problem: TuningProblem, base: PrecisionPlan, groups: list[FallbackGroup], target: Precision
) -> Generator[list[PrecisionPlan], list[Trial], list[FallbackGroup]]:
    """Rank groups by trials of each alone, if calibration has no data on their impact."""
    losses = dict.fromkeys(groups, float("inf"))
    for group in groups:
        plan = set_op_precision(problem.space, base, group.ops, target)
        if problem.space.resolve(plan).has_low_precision:
            (trial,) = yield [plan]
            losses[group] = trial.ranking_loss
            if trial.met:
                return [group]
    return sorted(groups, key=losses.__getitem__)


def _lower_producers(
    base: PrecisionPlan, plan: PrecisionPlan, raised: list[FallbackGroup]
) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Lower all mere producers of raised tensors in one trial; return whether it met the target."""
    consumers = {op for group in raised for op in group.ops - group.producers}
    producers = {op for group in raised for op in group.producers} - consumers
    if not producers:
        return False
    (trial,) = yield [plan.replacing({op: base[op] for op in producers})]
    return trial.met


class AutoMixedPrecision(Basic):
    """Intel Neural Compressor's `auto_mixed_precision`, which never uses INT8.

    1. Put all ops on the ALLOW list in 16 bits; others follow by the four lists. If both BF16 and
       FP16 were requested, try each and continue from the one with the smaller loss.
    2. One op type after the other falls back to FP32, including types that only follow.
    3. Each op falls back alone, from the outputs to the inputs, until a plan meets the target;
       otherwise cumulatively, in order of their gain. If a type helped in step 2, only its ops.
    4. If a plan of step 3 meets the target, ops whose fallback had no effect return to 16 bits.

    The published strategy ends with the first plan that meets the target, so a type that helped
    stays in FP32 as a whole, without step 4.

    Without INT8 no ops share a quantized tensor, so each op is decided individually. If no 16-bit
    precision was requested, nothing is proposed.

    Source: `strategy/auto_mixed_precision.py`.
    """

    name = "auto_mixed_precision"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        base: tuple[TuningProblem, PrecisionPlan] | None = None
        least_loss = inf
        for precision in (p for p in problem.precisions if p.is_16_bit):
            space = problem.space.restricted_to([precision])
            narrowed = replace(problem, space=space, precisions=(precision,))
            plan = space.fastest_plan()
            if not space.resolve(plan).has_low_precision:
                continue
            (trial,) = yield [plan]
            if trial.met:
                return
            if base is None or trial.ranking_loss < least_loss:
                base, least_loss = (narrowed, plan), trial.ranking_loss
        if base is not None:
            yield from self.fall_back(*base)

    def by_op(
        self, problem: TuningProblem, base: PrecisionPlan, helped: frozenset[str], target: Precision
    ) -> Generator[list[PrecisionPlan], list[Trial], bool]:
        """Run steps 3 and 4; return whether a plan met the target."""
        groups = order_fallback_groups(problem, base, helped)
        return (yield from op_by_op(problem, base, groups[::-1], target))
