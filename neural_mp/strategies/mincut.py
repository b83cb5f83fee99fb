"""`mincut`: the front of time against noise, by minimum cuts, bisected with real evaluations."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from neural_mp.core.enums import Approach, CalibrationAlgorithm, Objective, is_latency_only
from neural_mp.core.observations import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import RANGE_ALGORITHMS, Precision
from neural_mp.core.quantization_flow import QuantizedTensor
from neural_mp.core.trial import Trial
from neural_mp.search.corrections import (
    best_corrections,
    corrected_nsr,
    rescale_estimates,
    with_corrections,
)
from neural_mp.search.cost_model import (
    CostInputs,
    CostModel,
    cost_model,
    predicted_share,
    without_int8,
    without_tensors,
)
from neural_mp.search.min_cut import CutSolver, ParetoPoint, break_even_weight
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import Basic
from neural_mp.strategies.refinement import fastest_nearby, neighbours, only

#: A tensor with more noise than this share of its signal is given up in INT8 first.
_NSR_FALLBACK_THRESHOLD = 0.05
#: Plans tried in all, and where none has met the target by then.
_TRIALS, _TRIALS_AT_MOST = 4, 8
#: The tensors whose harm is measured at the outputs.
_MEASURED_EXACTLY = 4
#: A plan is faster if it takes less than this share of the other's time.
_FASTER_RATIO = 0.97
#: A trial whose time is off what single ops say by more than this share has its ops timed anew,
#: within the plan.
_OFF = 0.15
#: Trials of what was measured to be faster than the fastest trial.
_MAX_REFINEMENTS = 2
#: How many times as dear conversions are taken to be where a plan has turned out slow.
_CONVERSION_COST_FACTORS = (2, 4, 8)
#: Plans tried of those that were measured to be faster than FP32.
_FASTER_TRIALS = 2
#: More noise at the outputs than this, in terms of their power, is all the same.
_MAX_OUTPUT_NSR = 1e3
#: Another calibration algorithm has to leave at most this share of the noise at the outputs.
_MAX_NSR_RATIO_FOR_TRIAL = 0.25

Steps = Generator[list[PrecisionPlan], list[Trial], None]


class MinimumCut(Strategy):
    """A handful of evaluations, however many ops there are.

    Time, noise and conversions of all ops are one cost, of which a minimum cut finds the least for
    any weight of noise against time, exactly: the plans of all weights are the front.

    1. The fastest plan by measured times, noisy tensors repaired where that is free: by scaling
       channels. Most models pass at once.
    2. Where that missed the target: the tables out of INT8 that are in it for their size alone.
    3. Another calibration algorithm or corrected biases, where a few samples show far less noise.
    4. The tensors with more than 5 % of noise out of INT8.
    5. Between the slowest plan that missed the target and the fastest that met it, the front is
       halved, until nothing lies between or four plans were tried. Where none met it by then, the
       worst tensors go back, one, two, four and so on, up to eight plans in all.

    Plans that differ from the fastest in one decision are then measured as wholes, and the fastest
    of them is tried, too. Where the fastest trial takes another time than single ops say, by more
    than 15 %, its ops are timed within its model first, and the cut is solved again.

    A plan that meets the target and runs slower than FP32 tells that times were estimated too low:
    plans that keep less and less in INT8 are measured, and the fastest is tried.

    Noise is known of INT8 alone: without it in the space, this is `basic`.
    """

    name = "mincut"

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        if Precision.INT8 not in problem.space.usable_precisions:
            yield from Basic().search(problem)
            return
        yield from _Run(problem).search()


@dataclass
class _Run:
    problem: TuningProblem
    repairs: dict[str, str] = field(init=False)
    noise: dict[str, float] = field(init=False)
    model: CostModel = field(init=False)
    cut: CutSolver = field(init=False)
    tried: dict[ResolvedPlan, Trial] = field(default_factory=dict)
    #: What INT8 plans are made with beyond the best configs: a calibration algorithm, repairs.
    algorithm: CalibrationAlgorithm | None = None
    corrected: bool = False
    #: What was timed within a plan, in place of what the probe says at first.
    within: OpTimings | None = None

    def __post_init__(self) -> None:
        observations = self.problem.observations
        self.repairs = best_corrections(observations)
        self.noise = corrected_nsr(observations, self.repairs)
        self._model_with(self.noise)

    def _model_with(self, harms: Mapping[str, float]) -> None:
        self.model = self._cost_model(harms)
        self.cut = CutSolver(self.model.assignment)

    def _cost_model(self, harms: Mapping[str, float], conversions: float = 1.0) -> CostModel:
        return cost_model(self.problem.space, self._figures(harms, conversions))

    def _figures(self, harms: Mapping[str, float], conversions: float = 1.0) -> CostInputs:
        times = self.within or self.problem.probe.times()
        if times.conversion is not None:
            each = times.conversion * conversions
            times = replace(times, conversion=each, per_element=times.per_element * conversions)
        return CostInputs(
            harms,
            self.problem.objectives,
            times,
            {op.name: op.weights for op in self.problem.space.graph},
            self.problem.observations.elements,
            in_place=self.within is not None,
        )

    def search(self) -> Steps:
        fastest = self._fastest()
        first = yield from self._try(fastest)
        if first is None:
            return  # nothing runs in a lower precision, whatever the plan says
        if not first.meets_accuracy:
            for_size = self._figures(self.noise).for_size_alone(fastest)
            yield from self._try(without_int8(self.problem.space, fastest, for_size))
            if not self._has_met():
                yield from self._try_corrections(fastest)
            if not self._has_met():
                yield from self._bisect(fastest)
        yield from self._refine()
        if not self._has_met():
            yield from self._search_faster()

    def _has_met(self) -> bool:
        return any(trial.met for trial in self.tried.values())

    def _fastest(self) -> PrecisionPlan:
        """All as low as can be, or what is fastest by the times of single ops: what really is."""
        low, cut = self.problem.space.fastest_plan(), self.model.plan(self.cut.best(0.0))
        if not self._resolved(cut).has_low_precision or self._resolved(low) == self._resolved(cut):
            return low
        if Objective.PERFORMANCE not in self.problem.objectives:
            return cut
        seconds = self.problem.probe.latencies([self._finished(low), self._finished(cut)])
        if seconds is None:
            return cut
        return cut if seconds[1] < seconds[0] * _FASTER_RATIO else low

    def _resolved(self, plan: PrecisionPlan) -> ResolvedPlan:
        return self.problem.space.resolve(self._finished(plan))

    def _finished(self, plan: PrecisionPlan) -> PrecisionPlan:
        """A plan with what mends the numbers of its INT8 ops."""
        space = self.problem.space
        plan = with_corrections(plan, space, self.repairs)
        changes = {}
        for op, config in plan.items():
            if config.approach is Approach.STATIC and config.activation is not None:
                found = config
                if self.algorithm is not None:
                    spec = replace(config.activation, algorithm=self.algorithm)
                    other = replace(config, activation=spec)
                    known = replace(other, corrections=()) in space.capabilities[op].configs
                    found = other if known else config
                if self.corrected and found.corrections:
                    found = replace(found, corrections=(*found.corrections, "bias_correction"))
                changes[op] = found
        return plan.replacing(changes)

    def _try(
        self, plan: PrecisionPlan
    ) -> Generator[list[PrecisionPlan], list[Trial], Trial | None]:
        """The trial of a plan, which may have been tried before; None if it lowers nothing."""
        finished = self._finished(plan)
        resolved = self.problem.space.resolve(finished)
        if resolved not in self.tried and resolved.has_low_precision:
            (trial,) = yield [finished]
            self.tried[resolved] = trial
        return self.tried.get(resolved)

    def _refine(self) -> Steps:
        """Try what runs faster than the fastest trial, found by measuring plans near it as wholes.

        Where single ops do not predict the trial's time, they are timed anew, within its plan.
        """
        for _ in range(_MAX_REFINEMENTS):
            accurate = [trial for trial in self.tried.values() if trial.meets_accuracy]
            if not accurate or not is_latency_only(self.problem.objectives):
                return
            fastest = min(accurate, key=lambda trial: trial.relative_cost(self.problem.objectives))
            off = self._is_off(fastest)
            if off:
                self.within = self.problem.probe.times_within(fastest.plan) or self.within
            better = fastest_nearby(self.problem.probe, fastest.plan, self._candidates)
            if better is None and off:  # nothing can be measured: the trial will tell
                better = self._solved_within(fastest.plan)
            if better is None or self._resolved(better) in self.tried:
                return
            yield from self._try(better)

    def _is_off(self, trial: Trial) -> bool:
        """Whether a trial takes another time than single ops predict."""
        found = trial.objectives.get("relative_latency")
        predicted = predicted_share(self.problem.space, self._figures(self.noise), trial.plan)
        return found is not None and predicted is not None and abs(found / predicted - 1) > _OFF

    def _candidates(self, plan: PrecisionPlan) -> list[PrecisionPlan]:
        """Plans to measure beside a plan, most promising first.

        Where accuracy has kept ops out of INT8, they stay out.
        """
        space, figures = self.problem.space, replace(self._figures(self.noise), in_place=True)
        may_lower = all(trial.meets_accuracy for trial in self.tried.values())
        plans = [self._solved_within(plan), *neighbours(space, plan, figures, may_lower)]
        resolved = dict.fromkeys(self._resolved(other) for other in plans)
        known = {*self.tried, self.problem.space.resolve(plan)}
        return [found.plan for found in resolved if found not in known and found.has_low_precision]

    def _solved_within(self, plan: PrecisionPlan) -> PrecisionPlan:
        """The best plan by the times within another one.

        Where accuracy has kept ops out of INT8, they stay out.
        """
        model = self._cost_model(self.noise)
        cut = self._finished(model.plan(CutSolver(model.assignment).best(0.0)))
        if not all(trial.meets_accuracy for trial in self.tried.values()):
            cut = only(plan, _low(cut))
        return cut

    def _gains(self, plan: PrecisionPlan) -> dict[str, float]:
        """Op in a lower precision → the seconds that it gains, where both were timed."""
        times = (self.within or self.problem.probe.times()).ops
        return {
            op: by[Precision.FP32] - by[plan[op].precision]
            for op in _low(plan)
            if (by := times.get(op)) is not None and {Precision.FP32, plan[op].precision} <= set(by)
        }

    def _search_faster(self) -> Steps:
        """Only what gains in INT8, where all that is accurate has turned out slower than FP32.

        Single ops are timed roughly, and what converting between them costs more roughly still. So
        plans that keep less and less in INT8 are measured as wholes, beside FP32.
        """
        slow = [trial for trial in self.tried.values() if trial.meets_accuracy]
        if not slow:
            return
        plan = min(slow, key=lambda trial: trial.relative_cost(self.problem.objectives)).plan
        less = [kept for kept in (*self._scale_conversion_cost(plan), *self._gaining_most(plan))]
        less = [kept for kept in dict.fromkeys(less) if self._lowers(kept) and kept != plan]
        fp32 = self.problem.space.fp32_plan()
        seconds = self.problem.probe.latencies([fp32, *less])
        if seconds is None:
            ranked = less[-1:]
        else:
            taken = dict(zip(less, seconds[1:], strict=True))
            ranked = sorted((p for p in less if taken[p] < seconds[0]), key=taken.__getitem__)
        for kept in ranked[:_FASTER_TRIALS]:
            yield from self._try(kept)
            if self._has_met():
                return

    def _lowers(self, plan: PrecisionPlan) -> bool:
        return self.problem.space.resolve(plan).has_low_precision

    def _scale_conversion_cost(self, plan: PrecisionPlan) -> Iterator[PrecisionPlan]:
        """What is left of a plan's INT8 where conversions cost several times what was measured."""
        for factor in _CONVERSION_COST_FACTORS:
            model = self._cost_model(self.noise, factor)
            kept = model.plan(CutSolver(model.assignment).best(0.0))
            low = {op for op, config in kept.items() if config.precision is Precision.INT8}
            yield self.problem.space.resolve(only(plan, low)).plan

    def _gaining_most(self, plan: PrecisionPlan) -> Iterator[PrecisionPlan]:
        """A plan with all of its ops that gain, one by one, then half, a quarter, an eighth."""
        gains = self._gains(plan)
        best = sorted((op for op in gains if gains[op] > 0), key=lambda op: -gains[op])
        for share in (1, 2, 4, 8):
            kept = best[: len(gains) // share]
            yield self.problem.space.resolve(only(plan, kept)).plan

    def _try_corrections(self, plan: PrecisionPlan) -> Steps:
        """What else can be done for the numbers, if a few samples show that it does much."""
        probe = self.problem.probe
        before = probe.output_noise(self._finished(plan))
        if before is None:
            return
        best, least = (self.algorithm, self.corrected), before * _MAX_NSR_RATIO_FOR_TRIAL
        ways: list[tuple[CalibrationAlgorithm | None, bool]] = [
            (name, False) for name in RANGE_ALGORITHMS[1:]
        ]
        for way in (*ways, *([(None, True)] if self.repairs else [])):
            self.algorithm, self.corrected = way
            found = probe.output_noise(self._finished(plan))
            if found is not None and found < least:
                best, least = way, found
        self.algorithm, self.corrected = best
        yield from self._try(plan)

    def _bisect(self, fastest: PrecisionPlan) -> Steps:
        self._model_with(rescale_estimates(self.noise, self._exact(fastest)))
        missed, met = self.model.point(fastest), self.model.at(self.cut.best(inf))
        noisy = [t for t in self._worst() if self.noise.get(t.name, 0.0) > _NSR_FALLBACK_THRESHOLD]
        plan: PrecisionPlan | None = without_tensors(self.problem.space, fastest, noisy)
        if plan is not None and self._resolved(plan) in self.tried:
            plan = self._between(missed, met)
        while plan is not None and self._may_go_on():
            trial = None if self._resolved(plan) in self.tried else (yield from self._try(plan))
            if trial is None:
                break
            point = self.model.point(plan)
            missed, met = (missed, point) if trial.meets_accuracy else (point, met)
            plan = self._between(missed, met)
        if not any(trial.meets_accuracy for trial in self.tried.values()):
            yield from self._raise_in_turn(fastest)

    def _raise_in_turn(self, fastest: PrecisionPlan) -> Steps:
        """The worst tensors out of INT8: one, two, four, …, where the front has nothing more."""
        worst, count = self._worst(), 1
        while count < len(worst) and self._may_go_on():
            plan = without_tensors(self.problem.space, fastest, worst[:count])
            trial = yield from self._try(plan)
            if trial is not None and trial.meets_accuracy:
                return
            count *= 2

    def _worst(self) -> list[QuantizedTensor]:
        """The tensors, most noise first."""
        tensors = self.problem.space.tensors
        return sorted(tensors, key=lambda tensor: -self.noise.get(tensor.name, 0.0))

    def _may_go_on(self) -> bool:
        met = any(trial.met for trial in self.tried.values())
        return len(self.tried) < (_TRIALS if met else _TRIALS_AT_MOST)

    def _between(self, missed: ParetoPoint, met: ParetoPoint) -> PrecisionPlan | None:
        """The plan of the front between two of its points; None if one is better in every way."""
        weight = break_even_weight(missed, met)
        return None if weight is None else self.model.plan(self.cut.best(weight))

    def _exact(self, plan: PrecisionPlan) -> dict[str, float]:
        """Of the noisiest tensors, what of their noise arrives at the outputs."""
        found = {}
        for tensor in self._worst()[:_MEASURED_EXACTLY]:
            alone = only(plan, tensor.quantizing_ops)
            noise = self.problem.probe.output_noise(self._finished(alone), tensor.name)
            if noise is not None:
                found[tensor.name] = min(noise, _MAX_OUTPUT_NSR)
        return found


def _low(plan: PrecisionPlan) -> set[str]:
    """The ops that a plan has in a lower precision."""
    return {op for op, config in plan.items() if config.precision is not Precision.FP32}
