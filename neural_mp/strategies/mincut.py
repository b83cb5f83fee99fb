"""`mincut`: Pareto front of time and noise by minimum cuts, bisected with evaluations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from neural_mp.core.enums import Objective, is_latency_only
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.core.quantization_flow import QuantizedTensor
from neural_mp.core.trial import Trial
from neural_mp.search.corrections import (
    Int8Settings,
    apply_correction_nsr,
    choose_best_corrections,
    rescale_noise_estimates,
    with_corrections,
)
from neural_mp.search.cost_model import (
    CostInputs,
    CostModel,
    build_cost_model,
    predict_plan_time,
    without_int8,
    without_tensors,
)
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import Basic
from neural_mp.strategies.bit_allocation import BitAllocation
from neural_mp.strategies.refinement import (
    find_fastest_nearby,
    has_less_loss,
    list_first_fallbacks,
    list_further_fallbacks,
    list_low_ops,
    list_neighbouring_plans,
    lower_only,
    plan_halfway,
    tolerated_noise_ratio,
    without_a_type,
)

#: Maximum number of trials, and its value if none of them has met the target.
_TRIALS, _TRIALS_AT_MOST = 4, 8
#: Maximum number of trials between the last plan that missed the target and the one that met it.
_GAP_TRIALS = 2
#: Number of tensors whose sensitivity is measured at the outputs.
_MEASURED_EXACTLY = 4
#: If latency and prediction differ by more than this fraction, ops are timed again within the plan.
_OFF = 0.15
#: Maximum numbers of trials of plans measured as faster than the fastest trial, or than FP32.
_MAX_REFINEMENTS, _FASTER_TRIALS = 2, 2
#: Factors on conversion costs, tried if a plan is slower than FP32.
_CONVERSION_COST_FACTORS = (2, 4, 8)
#: Upper bound of the output NSR: plans above it are equally unusable.
_MAX_OUTPUT_NSR = 1e3
#: Maximum output NSR of a corrected plan, over the uncorrected one, for a trial at full speed.
_MAX_NSR_RATIO_FOR_TRIAL = 0.9

Steps = Generator[list[PrecisionPlan], list[Trial], None]


class MinimumCut(Strategy):
    """Search with few evaluations, independent of the number of ops.

    Time, noise and conversions of all ops form one cost. A minimum cut finds the exact optimum for
    any weight of noise against time; the plans of all weights form the Pareto front.

    1. The fastest plan by measured times; noisy tensors get corrections that cost no time: channel
       scaling. Most models meet the target here. After a miss, an equally fast plan with less INT8.
    2. Embedding tables quantized only for their size leave INT8, for good if that lowers the loss.
    3. Another calibration algorithm or bias correction, then weights learned from FP32 results
       (reconstruction), each if a few samples show less noise.
    4. As few tensors leave INT8 as narrow misses require, or else all with an NSR above 5 %.
    5. Bisection of the front between the slowest plan that missed the target and the fastest that
       met it, until no plan lies between or after four trials. If no plan has met the target, the
       noisiest tensors fall back in doubling steps (1, 2, 4, …), for at most eight trials in total.
    6. At most two trials between the plan that met the target and the closest that missed it.

    Then first plans about as fast, and plans that differ from the fastest in one decision, are
    measured against the fastest, and the fastest of all is tried.
    If its latency differs by more than 15 % from the prediction, its ops are timed within it first.

    If every plan that meets the accuracy target is slower than FP32, estimated times were too low:
    plans with less and less INT8 are measured, and the fastest is tried.

    With INT4 or less, `bit_allocation` comes first; with floats only, the strategy is `basic`.
    """

    name = "mincut"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        problem = without_slow_low_bits(problem)
        low = [p for p in problem.space.usable_precisions if p.is_low_bit]
        if low and (yield from has_met(BitAllocation().search(problem))):
            return
        problem = exclude_precisions(problem, low)
        has_int8 = Precision.INT8 in problem.space.usable_precisions
        yield from _Run(problem).run_search() if has_int8 else Basic().search(problem)


def fastest_by_time(problem: TuningProblem) -> PrecisionPlan:
    """Return the fastest plan by measured times; without times, the plan of lowest precisions."""
    return _Run(problem).find_fastest_plan()


@dataclass
class _Run:
    problem: TuningProblem
    corrections: dict[str, str] = field(init=False)
    noise: dict[str, float] = field(init=False)
    model: CostModel = field(init=False)
    tried: dict[ResolvedPlan, Trial] = field(default_factory=dict)
    settings: Int8Settings = field(default_factory=Int8Settings)
    #: Times measured within a plan, which replace those of the probe.
    within: OpTimings | None = None
    #: First plans that may be faster than the one that was tried.
    close: tuple[PrecisionPlan, ...] = ()

    def __post_init__(self) -> None:
        observations = self.problem.observations
        self.corrections = choose_best_corrections(observations)
        self.noise = apply_correction_nsr(observations, self.corrections)
        self.model = self._build_cost_model()

    def _build_cost_model(
        self, sensitivities: Mapping[str, float] | None = None, conversion_factor: float = 1.0
    ) -> CostModel:
        return build_cost_model(
            self.problem.space, self._collect_cost_inputs(sensitivities, conversion_factor)
        )

    def _collect_cost_inputs(
        self, sensitivities: Mapping[str, float] | None = None, conversion_factor: float = 1.0
    ) -> CostInputs:
        times = self.within or self.problem.probe.times()
        return CostInputs(
            self.noise if sensitivities is None else sensitivities,
            self.problem.objectives,
            times.scaled_conversions(conversion_factor),
            {op.name: op.weights for op in self.problem.space.graph},
            self.problem.observations.elements,
            in_place=self.within is not None,
        )

    def run_search(self) -> Steps:
        plans = choose_first_plans(self.problem, self.model, self._apply_int8_settings)
        fastest, self.close = plans.fastest, plans.close
        first = yield from self._try_plan(fastest)
        if first is None:
            return  # no op runs in a lower precision, whatever the plan
        if not first.meets_accuracy and plans.as_fast is not None:
            alternative = yield from self._try_plan(plans.as_fast)
            if alternative is not None and alternative.loss is not None:
                fastest, first = plans.as_fast, alternative
        if not first.meets_accuracy:
            for_size = self._collect_cost_inputs().in_int8_for_size_only(fastest)
            faithful = without_int8(self.problem.space, fastest, for_size)
            trial = yield from self._try_plan(faithful)
            if trial is not None and has_less_loss(trial, first):
                fastest, first = faithful, trial
            if not self._has_met():
                yield from self._try_corrections(fastest, first)
            if not self._has_met():
                yield from self._try_reconstruction(fastest)
            if not self._has_met():
                yield from self._bisect_front(fastest)
        yield from self._refine_fastest()
        if not self._has_met():
            yield from self._search_faster()

    def _has_met(self) -> bool:
        return any(trial.met for trial in self.tried.values())

    def find_fastest_plan(self) -> PrecisionPlan:
        """Return the fastest plan by latencies of whole models, see `fastest_by_time`."""
        space = self.problem.space
        if not self.problem.probe.times().ops:
            return self._apply_int8_settings(space.fastest_plan())
        plan = self._apply_int8_settings(
            choose_first_plans(self.problem, self.model, self._apply_int8_settings).fastest
        )

        def candidate_plans(plan: PrecisionPlan) -> list[PrecisionPlan]:
            plans = map(
                self._resolve_plan, without_a_type(space, plan, self._estimate_saved_seconds(plan))
            )
            return [resolved.plan for resolved in plans if resolved.has_low_precision]

        return find_fastest_nearby(self.problem.probe, plan, candidate_plans) or plan

    def _resolve_plan(self, plan: PrecisionPlan) -> ResolvedPlan:
        return self.problem.space.resolve(self._apply_int8_settings(plan))

    def _apply_int8_settings(self, plan: PrecisionPlan) -> PrecisionPlan:
        space = self.problem.space
        return self.settings.apply_to_plan(with_corrections(plan, space, self.corrections), space)

    def _try_plan(
        self, plan: PrecisionPlan
    ) -> Generator[list[PrecisionPlan], list[Trial], Trial | None]:
        """Return the trial of a plan, cached if tried before; None without a lower precision."""
        finished = self._apply_int8_settings(plan)
        resolved = self.problem.space.resolve(finished)
        if resolved not in self.tried and resolved.has_low_precision:
            (trial,) = yield [finished]
            self.tried[resolved] = trial
        return self.tried.get(resolved)

    def _refine_fastest(self) -> Steps:
        """Try plans near the fastest trial whose measured latency is lower.

        If single ops do not predict the trial's latency, they are timed again within its plan.
        """
        for _ in range(_MAX_REFINEMENTS):
            accurate = [trial for trial in self.tried.values() if trial.meets_accuracy]
            if not accurate or not is_latency_only(self.problem.objectives):
                return
            fastest = min(accurate, key=lambda trial: trial.relative_cost(self.problem.objectives))
            off = self._is_latency_mispredicted(fastest)
            if off:
                self.within = self.problem.probe.times_within(fastest.plan) or self.within
            better = find_fastest_nearby(
                self.problem.probe, fastest.plan, self._iterate_nearby_candidates
            )
            if better is None and off:  # No measurement: the trial decides.
                better = self._solve_within_plan(fastest.plan)
            if better is None or self._resolve_plan(better) in self.tried:
                return
            yield from self._try_plan(better)

    def _is_latency_mispredicted(self, trial: Trial) -> bool:
        measured = trial.objectives.get("relative_latency")
        predicted = predict_plan_time(self.problem.space, self._collect_cost_inputs(), trial.plan)
        return (
            measured is not None and predicted is not None and abs(measured / predicted - 1) > _OFF
        )

    def _iterate_nearby_candidates(self, plan: PrecisionPlan) -> Iterator[PrecisionPlan]:
        """Yield plans to measure against a plan, most promising first.

        If a trial missed the accuracy target, no further ops move to INT8.
        """
        space, inputs = self.problem.space, replace(self._collect_cost_inputs(), in_place=True)
        nearby = list_neighbouring_plans(space, plan, inputs, may_lower=self._all_accurate())
        close = self.close if self._all_accurate() else ()
        resolved = map(self._resolve_plan, [*close, self._solve_within_plan(plan), *nearby])
        visited = {*self.tried, space.resolve(plan)}
        for candidate in resolved:
            if candidate not in visited and candidate.has_low_precision:
                visited.add(candidate)
                yield candidate.plan

    def _solve_within_plan(self, plan: PrecisionPlan) -> PrecisionPlan:
        """Return the best plan by the times measured within another plan.

        If a trial missed the accuracy target, no further ops move to INT8.
        """
        cut = self._apply_int8_settings(self._build_cost_model().find_best_plan(0.0))
        return cut if self._all_accurate() else lower_only(plan, list_low_ops(cut))

    def _all_accurate(self) -> bool:
        return all(trial.meets_accuracy for trial in self.tried.values())

    def _estimate_saved_seconds(self, plan: PrecisionPlan) -> dict[str, float]:
        """Return op in a lower precision → saved seconds, for ops timed in both precisions."""
        times = (self.within or self.problem.probe.times()).ops
        return {
            op: by[Precision.FP32] - by[plan[op].precision]
            for op in list_low_ops(plan)
            if (by := times.get(op)) is not None and {Precision.FP32, plan[op].precision} <= set(by)
        }

    def _search_faster(self) -> Steps:
        """Try plans with less INT8 if all accurate plans are slower than FP32.

        Times of single ops are rough: plans with less and less INT8 are measured as whole models.
        """
        slow = [trial for trial in self.tried.values() if trial.meets_accuracy]
        if not slow:
            return
        plan = min(slow, key=lambda trial: trial.relative_cost(self.problem.objectives)).plan
        fewer: list[PrecisionPlan] = []
        for factor in _CONVERSION_COST_FACTORS:
            cut = self._build_cost_model(conversion_factor=factor).find_best_plan(0.0)
            fewer.append(
                lower_only(plan, [op for op in cut if cut[op].precision is Precision.INT8])
            )
        gains = self._estimate_saved_seconds(plan)
        best = sorted((op for op in gains if gains[op] > 0), key=lambda op: -gains[op])
        # All ops that gain time, then the top half, quarter, eighth.
        fewer += [lower_only(plan, best[: len(gains) // divisor]) for divisor in (1, 2, 4, 8)]
        plans = dict.fromkeys(self.problem.space.resolve(candidate).plan for candidate in fewer)
        less = [p for p in plans if p != plan and self._resolve_plan(p).has_low_precision]
        seconds = self.problem.probe.latencies([self.problem.space.fp32_plan(), *less])
        if seconds is None:
            ranked = less[-1:]
        else:
            latency = dict(zip(less, seconds[1:], strict=True))
            ranked = sorted((p for p in less if latency[p] < seconds[0]), key=latency.__getitem__)
        for candidate in ranked[:_FASTER_TRIALS]:
            yield from self._try_plan(candidate)
            if self._has_met():
                return

    def _try_corrections(self, plan: PrecisionPlan, missed: Trial) -> Steps:
        """Try the calibration algorithm or bias correction with the least noise on few samples."""
        probe = self.problem.probe
        baseline = probe.output_noise(self._apply_int8_settings(plan))
        if baseline is None:
            return
        worthwhile = max(_MAX_NSR_RATIO_FOR_TRIAL, tolerated_noise_ratio(self.problem, missed))
        best, least = self.settings, baseline * worthwhile
        settings = [Int8Settings(name) for name in RANGE_ALGORITHMS[:0:-1]]  # the best come last
        settings += [Int8Settings(bias_correction=True)] if self.corrections else []
        for self.settings in settings:
            noise = probe.output_noise(self._apply_int8_settings(plan))
            if noise is not None and noise < least:
                best, least = self.settings, noise
        self.settings = best
        yield from self._try_plan(plan)

    def _try_reconstruction(self, plan: PrecisionPlan) -> Steps:
        """Try weights learned from FP32 results, if a few samples show less noise."""
        probe, unlearned = self.problem.probe, self.settings
        learned = probe.reconstructable_ops()
        baseline = probe.output_noise(self._apply_int8_settings(plan)) if learned else None
        if baseline is None:
            return
        self.settings = replace(unlearned, learned=learned)
        noise = probe.output_noise(self._apply_int8_settings(plan))
        if noise is None or noise >= baseline * _MAX_NSR_RATIO_FOR_TRIAL:
            self.settings = unlearned
        yield from self._try_plan(plan)

    def _bisect_front(self, fastest: PrecisionPlan) -> Steps:
        self.model = self._build_cost_model(
            rescale_noise_estimates(self.noise, self._measure_output_noise(fastest))
        )
        missed, met = (
            self.model.plan_cost(fastest),
            self.model.assignment.evaluate_cost(self.model.cut_solver.find_best_levels(inf)),
        )
        first, tensors = self.tried[self._resolve_plan(fastest)], self._list_noisiest_tensors()
        guesses = list_first_fallbacks(self.problem, self.model, first, tensors, self.noise)
        guesses = [plan for plan in guesses if self._resolve_plan(plan) not in self.tried]
        while self._may_go_on():
            time, gain = met[0] - missed[0], missed[1] - met[1]
            if guesses:
                plan = guesses.pop(0)
            elif time > 0 and gain > 0:  # at this weight, both costs are equally good
                plan = self.model.find_best_plan(time / gain)
            else:
                break
            if self._resolve_plan(plan) in self.tried:
                break
            if (trial := (yield from self._try_plan(plan))) is None:
                break
            if trial.meets_accuracy:
                met, guesses = self.model.plan_cost(plan), []
            else:
                missed = self.model.plan_cost(plan)
                again = list_further_fallbacks(self.problem, self.model, (first, trial), tensors)
                guesses = [p for p in again if self._resolve_plan(p) not in self.tried] + guesses
        if not any(trial.meets_accuracy for trial in self.tried.values()):
            yield from self._fall_back_by_noise(fastest)
        for _ in range(_GAP_TRIALS):
            trials = list(self.tried.values())
            halfway = plan_halfway(
                self.problem.space, self.model, trials, self._list_noisiest_tensors()
            )
            if halfway is not None:
                yield from self._try_plan(halfway)

    def _fall_back_by_noise(self, fastest: PrecisionPlan) -> Steps:
        """Move the noisiest tensors out of INT8 in doubling steps, once the front is exhausted."""
        tensors, count = self._list_noisiest_tensors(), 1
        while count < len(tensors) and self._may_go_on():
            plan = without_tensors(self.problem.space, fastest, tensors[:count])
            trial = yield from self._try_plan(plan)
            if trial is not None and trial.meets_accuracy:
                return
            count *= 2

    def _list_noisiest_tensors(self) -> list[QuantizedTensor]:
        return sorted(
            self.problem.space.tensors, key=lambda t: self.noise.get(t.name, 0.0), reverse=True
        )

    def _may_go_on(self) -> bool:
        return len(self.tried) < (_TRIALS if self._has_met() else _TRIALS_AT_MOST)

    def _measure_output_noise(self, plan: PrecisionPlan) -> dict[str, float]:
        """Return the output noise due to each of the noisiest tensors."""
        noises = {}
        for tensor in self._list_noisiest_tensors()[:_MEASURED_EXACTLY]:
            isolated = lower_only(plan, tensor.quantizing_ops)
            noise = self.problem.probe.output_noise(
                self._apply_int8_settings(isolated), tensor.name
            )
            if noise is not None:
                noises[tensor.name] = min(noise, _MAX_OUTPUT_NSR)
        return noises


#: A plan counts as faster below this ratio of measured latencies, or of predicted ones, if minimal.
_FASTER, _PREDICTED_AS_FASTER = 0.97, 0.85
#: First plans up to this ratio of latencies, and so many of them, are measured against the fastest
#: again: a few runs of a whole model are rough.
_CLOSE, _CLOSE_PLANS = 1.1, 2
#: A plan without INT8 is measured up to this ratio of predicted latencies.
_WORTH_A_MEASUREMENT = 1.5


@dataclass(frozen=True)
class FirstPlans:
    """The plans that come first.

    Attributes:
        fastest: the plan with the lowest precisions, or one that is clearly faster.
        as_fast: a plan with less INT8 that was measured as no slower than the lowest precisions.
        close: plans that were measured as slower than `fastest` by no more than noise may explain.
    """

    fastest: PrecisionPlan
    as_fast: PrecisionPlan | None = None
    close: tuple[PrecisionPlan, ...] = ()


def choose_first_plans(
    problem: TuningProblem, model: CostModel, finished: Callable[[PrecisionPlan], PrecisionPlan]
) -> FirstPlans:
    """Return the plans to start from; `finished` completes a plan by corrections."""
    space, low = problem.space, problem.space.fastest_plan()
    lowest = space.resolve(finished(low))
    resolved = {plan: space.resolve(finished(plan)) for plan in _faster_by_ops(low, model)}
    candidates = [p for p, r in resolved.items() if r.has_low_precision and r != lowest]
    if not candidates:
        return FirstPlans(low)
    if Objective.PERFORMANCE not in problem.objectives:
        return FirstPlans(candidates[0])
    seconds = problem.probe.first_latencies([finished(plan) for plan in (low, *candidates)])
    if seconds is None:
        baseline, least = (model.plan_cost(plan)[0] for plan in (low, candidates[0]))
        return FirstPlans(candidates[0] if least < baseline * _PREDICTED_AS_FASTER else low)
    baseline, *measured = seconds
    least, best = min(zip(measured, candidates, strict=True), key=lambda pair: pair[0])
    fastest = best if least < baseline * _FASTER else low
    close = sorted(
        (duration, index)
        for index, duration in enumerate(seconds)
        if duration < _CLOSE * min(seconds) and (low, *candidates)[index] != fastest
    )
    near = tuple((low, *candidates)[index] for _, index in close[:_CLOSE_PLANS])
    return FirstPlans(fastest, best if fastest == low and least <= baseline else None, near)


def _faster_by_ops(low: PrecisionPlan, model: CostModel) -> Iterator[PrecisionPlan]:
    """Yield the minimum cut, and plans with fewer ops in INT8 than the lowest precisions.

    Most ops without INT8 take too little time to tell two float precisions apart, while a change
    from one to the other between two ops costs more than it gains. So the ops that the cut speeds
    up take its precisions first, and then the lowest float precision, as all ops without INT8 do
    next, and all ops last: single ops do not show the conversions that a whole model saves.
    """
    cut = model.find_best_plan(0.0)
    yield cut

    def get_op_time(op: str, plan: PrecisionPlan) -> float:
        return model.assignment.costs[op][model.levels.index(plan[op].precision)][0]

    in_int8 = [op for op in low if low[op].precision is Precision.INT8 and op in cut]
    faster = [op for op in in_int8 if get_op_time(op, cut) < get_op_time(op, low)]
    yield low.replacing({op: cut[op] for op in faster})
    yield low.replacing({op: _find_lowest_float(op, model) for op in faster})
    floats = [precision for precision in model.space.usable_precisions if precision.is_16_bit]
    if not floats:
        return
    yield model.space.with_floats_in(low, floats[0])
    in_floats = low.replacing({op: _find_lowest_float(op, model) for op in in_int8})
    if model.plan_cost(in_floats)[0] < _WORTH_A_MEASUREMENT * model.plan_cost(low)[0]:
        yield model.space.with_floats_in(in_floats, floats[0])


def _find_lowest_float(op: str, model: CostModel) -> OpConfig:
    floats = (model.space.choice(op, level) for level in model.levels if not level.is_integer)
    return next(config for config in floats if config is not None)


def without_slow_low_bits(problem: TuningProblem) -> TuningProblem:
    """Return the problem without INT4 if other precisions compute the same ops in less time.

    Kernels for 4 bits win where weights are read for a few rows, as in decoding, and lose to INT8
    for many rows. Size counts for the other objectives, so INT4 then stays, as it does without
    INT8 or without measured times. With a workload, the times of a batch do not decide.
    """
    space, usable = problem.space, problem.space.usable_precisions
    if problem.workload is not None:
        return problem
    if not {Precision.INT4, Precision.INT8} <= {*usable} or not is_latency_only(problem.objectives):
        return problem
    times = problem.probe.times().ops
    able = [op for op in space.tunable_ops if space.choice(op, Precision.INT4) is not None]
    measured = [times[op] for op in able if Precision.INT4 in times.get(op, {})]
    low = sum(by_precision[Precision.INT4] for by_precision in measured)
    rest = sum(
        min((s for p, s in by_precision.items() if p is not Precision.INT4), default=0.0)
        for by_precision in measured
    )
    if not measured or low < rest:
        return problem
    return exclude_precisions(problem, [Precision.INT4])


def exclude_precisions(problem: TuningProblem, precisions: Collection[Precision]) -> TuningProblem:
    """Return the problem without some precisions."""
    if not precisions:
        return problem
    remaining = {*problem.space.usable_precisions}.difference(precisions)
    return replace(problem, space=problem.space.restricted_to(remaining))


def has_met(search: Search) -> Generator[list[PrecisionPlan], list[Trial], bool]:
    """Run a search, and return whether a plan besides FP32 met the accuracy target."""
    met, fp32 = False, {Precision.FP32}
    try:
        plans = next(search)
        while True:
            trials = yield plans
            met = met or any(t.meets_accuracy and {*t.plan.counts()} != fp32 for t in trials)
            plans = search.send(trials)
    except StopIteration:
        return met
