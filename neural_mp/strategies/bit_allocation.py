"""`bit_allocation`: bits of each weight by a knapsack over the Fisher probe's noise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import inf, log, sqrt

from neural_mp.core.enums import Approach, Objective
from neural_mp.core.op_timings import FormTimes, OpTimings, Workload, describe_timed_form
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.search.assignment import Filling, Form, Knapsack
from neural_mp.search.cost_model import CostInputs
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import Basic

#: Maximum number of trials once a plan met the target, and before.
_TRIALS, _TRIALS_AT_MOST = 4, 8
#: Fraction of the tolerated loss that a plan is chosen for: predictions have errors of both signs.
_AIM_RATIO = 0.9
#: Least exponent of the noise that the loss is taken to grow with, from two trials.
_LEAST_EXPONENT = 0.5
#: The cheapest plan is not tried first if its predicted loss exceeds the tolerance by this factor.
_HOPELESS_RATIO = 4.0
#: A plan must be cheaper by this fraction of FP32's cost to be worth a trial.
_LEAST_GAIN = 0.005
#: Noise of a layer whose inputs are rounded to 8 bits as well, compared with its weight alone.
_WITH_INPUTS = 2.0
#: Bits of the parameters of a group: scale and offset in bfloat16.
_GROUP_BITS = 32


class BitAllocation(Strategy):
    """Search for the least bits per weight that meet the target, for models of large weights.

    1. The Fisher probe gives the noise of every weight in every form of storage, in one pass.
    2. As weights that leave the inputs in float need no conversions, the least cost for any noise
       is a knapsack: each step replaces one form by a larger one, the steps with the largest
       reduction of noise per cost first.
    3. The cheapest plan is tried, or the cheapest one with a divergence within the tolerance, if
       that of the cheapest is out of proportion and most weights can be stored in fewer bits. Its
       loss and noise predict the losses of all others; the cheapest plan predicted within the
       tolerance is tried, and the prediction corrected by each trial: at most four, or eight until
       a plan met the target. From the second trial on, the loss is taken as a power of the noise: a
       bound of the loss over other data falls more slowly than the loss.

    With a workload, time is the mean time per token from the times of every form at the numbers of
    rows in use, and layers in dynamic INT8 take part. A form that BF16 beats at each is left out.

    Without gradients, the noise at the results of each layer, scaled by one measurement at the
    outputs. Without either, and for ops that have no such form, the strategy is `basic`.
    """

    name = "bit_allocation"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        knapsack = _build_knapsack(problem, problem.probe.weight_noise())
        yield from (
            Basic().search(problem) if knapsack is None else _try_noise_budgets(problem, knapsack)
        )


def _try_noise_budgets(problem: TuningProblem, knapsack: Knapsack) -> Search:
    """Try a plan by its predicted loss, then plans between those that missed and those that met."""
    missed: Filling | None = None
    met: Filling | None = None
    tolerance = problem.tolerance
    point: Filling | None = _choose_first_filling(knapsack, tolerance)
    tried: list[tuple[float, float]] = []
    while point is not None and len(tried) < (_TRIALS_AT_MOST if met is None else _TRIALS):
        (trial,) = yield [problem.space.fastest_plan().replacing(point.configs)]
        if trial.meets_accuracy:
            met = point
        else:
            missed = point
        tried.append((point.noise, trial.ranking_loss))
        aim = _predict_next_noise(tried, knapsack.start.noise, missed, met, tolerance)
        candidate = None if aim is None else knapsack.find_cheapest_filling(aim)
        limit = inf if met is None else met.cost - _LEAST_GAIN
        is_new = candidate is not None and candidate not in (met, missed) and candidate.cost < limit
        point = candidate if is_new else None


def _choose_first_filling(knapsack: Knapsack, tolerance: float | None) -> Filling:
    """Return the cheapest filling, unless its divergence leaves no hope.

    The loss of perplexity, as a fraction, is about the divergence; other losses are of its order.
    Divergences of other outputs than logits have a scale of their own: a filling that leaves most
    weights as they are would show nothing of that scale, and the cheapest one shows all of it.
    """
    start = knapsack.start
    if not tolerance or start.noise <= _HOPELESS_RATIO * tolerance:
        return start
    expected = knapsack.find_cheapest_filling(_AIM_RATIO * tolerance)
    return expected if expected.cost <= (start.cost + knapsack.highest_cost) / 2 else start


def _predict_next_noise(
    tried: Sequence[tuple[float, float]],
    most: float,
    missed: Filling | None,
    met: Filling | None,
    tolerance: float | None,
) -> float | None:
    """Return the noise of the next plan; None without a prediction.

    `tried` holds noise and loss of the plans so far, `missed` and `met` the latest of either kind;
    `most` is the noise of the cheapest plan.
    """
    noise, loss = tried[-1]
    if tolerance and 0 < loss < inf and noise > 0:
        aim = noise * (_AIM_RATIO * tolerance / loss) ** (1 / _fit_loss_exponent(tried[-2:]))
    elif missed is not None and noise == missed.noise:
        aim = noise / 4
    else:
        # Lossless: without another plan to compare with, more noise is worth a trial.
        aim = max(noise * 4, sqrt(noise * most)) if missed is None else inf
    low, high = (0.0 if met is None else met.noise), (inf if missed is None else missed.noise)
    if met is not None and missed is not None and not low < aim < high:
        # Halve the interval where the prediction leaves it.
        return sqrt(low * high)
    if missed is not None:
        return min(aim, _AIM_RATIO * high)
    return aim if aim > low else None


def _fit_loss_exponent(tried: Sequence[tuple[float, float]]) -> float:
    """Return the power of the noise that the losses of two plans grow with; 1 if unknown."""
    if len(tried) < 2 or not all(0 < value < inf for pair in tried for value in pair):
        return 1.0
    (noise, loss), (other_noise, other_loss) = tried
    if noise == other_noise or loss == other_loss:
        return 1.0
    exponent = log(loss / other_loss) / log(noise / other_noise)
    return min(max(exponent, _LEAST_EXPONENT), 1.0)


def weights_by_bytes(problem: TuningProblem) -> Knapsack:
    """Return the choices of all weights with several forms, by their noise and bytes.

    With a workload, a form slower than BF16 at every number of rows in use is no choice.
    """
    times = {} if problem.workload is None else problem.probe.form_times(problem.workload)
    noise = problem.probe.weight_noise()
    shared = find_shared_floats(problem.space, noise)

    return _build_cost_knapsack(
        problem,
        noise,
        lambda op, config: (
            problem.space.graph[op].weights * _count_added_bits(config, op in shared) / 8
        ),
        lambda op: (
            [config for config, _ in _no_slower_than_bf16(problem, op, times[op])]
            if op in times
            else problem.space.choices(op)
        ),
    )


def find_shared_floats(space: TuningSpace, scored: Collection[str]) -> frozenset[str]:
    """Return the ops whose weight stays as floats for another op, such as an excluded tied head."""
    readers: defaultdict[str, set[str]] = defaultdict(set)
    for op in space.graph:
        for constant in op.constants:
            readers[constant].add(op.name)
    convertible = {op for op in space.tunable_ops if op in scored}
    return frozenset(
        op for ops in readers.values() if not ops <= convertible for op in ops & convertible
    )


def _count_added_bits(config: OpConfig, is_shared: bool) -> float:
    """Return the bits per element that a configuration adds to those stored in any case."""
    return 0.0 if is_shared and config == FP32 else count_weight_bits(config)


def count_weight_bits(config: OpConfig) -> float:
    """Return the bits per element of a weight, with the parameters of its groups."""
    spec = config.weight
    bits = float(config.precision.bits if spec is None else spec.dtype.bits)
    if spec is not None and spec.group_size is not None:
        bits += _GROUP_BITS / spec.group_size
    return bits


def _build_knapsack(
    problem: TuningProblem, noise: Mapping[str, Mapping[str, float]]
) -> Knapsack | None:
    """Return the choices of all ops by the objectives; None if no op has several forms."""
    times = {} if problem.workload is None else problem.probe.form_times(problem.workload)
    if problem.workload is not None and times:
        # One form per op, without steps, is a choice as well: a fast one without noise.
        knapsack = _build_workload_knapsack(problem, noise, problem.workload, times)
        return knapsack if knapsack.start.forms else None
    figures = CostInputs(
        {},
        problem.objectives,
        problem.probe.times() if Objective.PERFORMANCE in problem.objectives else OpTimings(),
        {op.name: op.weights for op in problem.space.graph},
    )
    fractions = figures.op_fractions(problem.space.tunable_ops)
    shared = find_shared_floats(problem.space, noise)
    importance = problem.objectives.get(Objective.PERFORMANCE, 0.0)

    def estimate_config_cost(op: str, config: OpConfig) -> float:
        emulated = problem.space.capabilities[op].emulated
        ratio = figures.time_ratio(op, config.precision, config.precision in emulated)
        time, size = fractions[op]
        bits = _count_added_bits(config, op in shared)
        return importance * time * ratio + (1 - importance) * size * bits / 32

    knapsack = _build_cost_knapsack(problem, noise, estimate_config_cost, problem.space.choices)
    return knapsack if knapsack.steps else None


def _build_workload_knapsack(
    problem: TuningProblem,
    noise: Mapping[str, Mapping[str, float]],
    workload: Workload,
    times: Mapping[str, FormTimes],
) -> Knapsack:
    """Weigh the time per token of the timed ops against their bits."""
    importance = problem.objectives.get(Objective.PERFORMANCE, 0.0)
    weights = {op: problem.space.graph[op].weights for op in times}
    seconds = sum(
        workload.seconds_per_token(form_times[str(FP32)]) for form_times in times.values()
    )
    forms = {}
    for op in (op for op in problem.space.tunable_ops if op in times and op in noise):
        size = weights[op] / (sum(weights.values()) or 1)
        forms[op] = [
            Form(
                config,
                importance * workload.seconds_per_token(durations) / seconds
                + (1 - importance) * size * count_weight_bits(config) / 32,
                harm,
            )
            for config, durations in _no_slower_than_bf16(problem, op, times[op])
            if (harm := _estimate_config_noise(config, noise[op])) is not None
        ]
    return Knapsack.from_forms(forms)


def _no_slower_than_bf16(
    problem: TuningProblem, op: str, times: FormTimes
) -> Iterator[tuple[OpConfig, Mapping[int, float]]]:
    """Yield the timed forms of an op, without those that BF16 beats at every number of rows.

    FP32 stays, as no other form has the accuracy of the source for certain.
    """
    limit = times.get(str(Precision.BF16), {})
    for config in problem.space.choices(op):
        durations = times.get(describe_timed_form(config) or "")
        if durations is None:
            continue
        slower = bool(limit) and all(durations[rows] > limit[rows] for rows in durations)
        if config == FP32 or not slower:
            yield config, durations


def _estimate_config_noise(config: OpConfig, noise: Mapping[str, float]) -> float | None:
    """Return the noise of an op in a configuration; None if unknown."""
    if config.weight is None:
        return 0.0
    harm = noise.get(str(config.weight))
    dynamic = config.approach is Approach.DYNAMIC
    return _WITH_INPUTS * harm if dynamic and harm is not None else harm


def _build_cost_knapsack(
    problem: TuningProblem,
    noise: Mapping[str, Mapping[str, float]],
    cost: Callable[[str, OpConfig], float],
    choices: Callable[[str], Iterable[OpConfig]],
) -> Knapsack:
    """Return the choices of all ops whose weights can be stored in fewer bits."""
    forms = {}
    for op in problem.space.tunable_ops:
        if op in noise:
            harms = (
                (c, _estimate_config_noise(c, noise[op]))
                for c in choices(op)
                if c.activation is None
            )
            forms[op] = [Form(c, cost(op, c), harm) for c, harm in harms if harm is not None]
    return Knapsack.from_forms(forms)
