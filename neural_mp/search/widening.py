"""Path of plans from the narrowest widths to wider ones, most noise removed per cost first.

The noise of a plan is the sum of the noises of its tensors and weights, measured alone: rounding
errors are nearly independent. A tensor is as noisy as the narrowest op that writes or reads it, so
that one step widens all of these ops. Steps for activations and for weights compete by the same
ratio: one multiplier between noise and cost, as in a knapsack (`search.knapsack`).

Ahead of the path, other calibration algorithms may lower the noise of the narrowest widths, which
costs nothing on the target.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from neural_mp.core.enums import CalibrationAlgorithm
from neural_mp.core.observations import TensorNoise, WidthFigures
from neural_mp.core.precision import OpConfig
from neural_mp.core.quant_spec import RANGE_ALGORITHMS

#: Calibration algorithm of ranges unless another one is chosen.
_DEFAULT = CalibrationAlgorithm.MINMAX
#: Fraction by which noise must fall for another algorithm or a correction to be chosen.
LEAST_FALL_RATIO = 0.1
#: Cost of an op in a config.
CostOf = Callable[[str, OpConfig], float]


@dataclass(frozen=True)
class WidthPlan:
    """A point of the path.

    Attributes:
        configs: op → its config.
        noise: predicted NSR at the outputs.
        cost: estimated cost.
    """

    configs: Mapping[str, OpConfig]
    noise: float
    cost: float


def trace_widening_path(
    choices: Mapping[str, Sequence[OpConfig]], figures: WidthFigures, cost_of: CostOf
) -> list[WidthPlan]:
    """Return the plans from the narrowest to all-float ones, in falling noise.

    Ops go to float only when all are in their widest integers: islands of float cost conversions.
    Ops with integers of one width are no exception for the others, and go to float before.

    Args:
        choices: op → its configs, the narrowest first, the float config last.
        figures: noise of tensors and weights.
        cost_of: the estimated cost of an op in a config.
    """
    search = _Widening(choices, figures, cost_of)
    return list(search.iterate_plans())


def choose_algorithms(figures: WidthFigures) -> dict[str, CalibrationAlgorithm]:
    """Return op → the calibration algorithm with the least noise, of ops that gain by another.

    An op decides on the tensors of which it is the first: the noise of all of them counts.
    """
    decided: dict[str, list[TensorNoise]] = defaultdict(list)
    for tensor in figures.tensors:
        decided[tensor.ops[0]].append(tensor)
    chosen: dict[str, CalibrationAlgorithm] = {}
    for op, tensors in decided.items():
        noise = {str(a): sum(t.typical_noise_by(a) for t in tensors) for a in RANGE_ALGORITHMS}
        best = min(RANGE_ALGORITHMS, key=noise.__getitem__)
        if noise[best] < (1 - LEAST_FALL_RATIO) * noise[_DEFAULT]:
            chosen[op] = best
    return chosen


def with_algorithms(
    figures: WidthFigures, algorithms: Mapping[str, CalibrationAlgorithm]
) -> WidthFigures | None:
    """Return the noise of tensors under chosen algorithms; None if all noise falls too little."""
    after = [t.typical_noise_by(algorithms.get(t.ops[0], _DEFAULT)) for t in figures.tensors]
    before = [tensor.typical_noise_by(_DEFAULT) for tensor in figures.tensors]
    if not sum(after) < (1 - LEAST_FALL_RATIO) * sum(before):
        return None
    tensors = tuple(
        tensor.scale_by(new / old) if old else tensor
        for tensor, new, old in zip(figures.tensors, after, before, strict=True)
    )
    return replace(figures, tensors=tensors)


def with_best_calibration(
    configs: Mapping[str, OpConfig],
    figures: WidthFigures,
    algorithms: Mapping[str, CalibrationAlgorithm],
) -> dict[str, OpConfig]:
    """Return the configs of a plan with the chosen calibration algorithms.

    Only where a tensor has its fewest bits: more bits reach its outliers without other noise.
    """
    result = dict(configs)
    for tensor in figures.tensors:
        op, fewest = tensor.ops[0], min(map(int, tensor.noise))
        spec = configs[op].activation
        is_narrow = any(_get_activation_bits(configs[name]) == fewest for name in tensor.ops)
        if op in algorithms and is_narrow and spec is not None:
            spec = replace(spec, algorithm=algorithms[op])
            result[op] = replace(configs[op], activation=spec)
    return result


@dataclass
class _Widening:
    choices: Mapping[str, Sequence[OpConfig]]
    figures: WidthFigures
    cost_of: CostOf
    level: dict[str, int] = field(default_factory=dict)
    takes_float: bool = False

    def __post_init__(self) -> None:
        self.level = dict.fromkeys(self.choices, 0)
        self.touched: dict[str, list[TensorNoise]] = defaultdict(list)
        for tensor in self.figures.tensors:
            for op in tensor.ops:
                self.touched[op].append(tensor)

    def iterate_plans(self) -> Iterator[WidthPlan]:
        """Yield the plans of the path."""
        noise = sum(map(self._current_tensor_noise, self.figures.tensors))
        noise += sum(self._weight_noise_at(op, 0) for op in self.choices)
        plan = WidthPlan(
            self._current_configs(), noise, sum(self._op_cost(op, 0) for op in self.choices)
        )
        yield plan
        for takes_float in (False, True):
            self.takes_float, last = takes_float, plan
            for plan in self._iterate_plans_from(last.noise, last.cost):
                yield plan

    def _iterate_plans_from(self, noise: float, cost: float) -> Iterator[WidthPlan]:
        """Yield the plans of all steps that remove noise, from the current levels on."""
        waiting = [step for step in self._iterate_steps() if step[0] < 0]
        heapq.heapify(waiting)
        while waiting:
            _, name, is_weight = heapq.heappop(waiting)
            raised = self._raised_levels(name, is_weight)
            gain, price = self._step_effect(raised)
            if gain <= 0 or not raised:
                continue
            current = -gain / max(price, 1e-30)
            if waiting and current > waiting[0][0]:  # other steps have changed its effect
                heapq.heappush(waiting, (current, name, is_weight))
                continue
            self.level.update(raised)
            noise, cost = noise - gain, cost + price
            yield WidthPlan(self._current_configs(), max(noise, 0.0), cost)
            following = self._step_ratio(name, is_weight)
            if following < 0:
                heapq.heappush(waiting, (following, name, is_weight))

    def _current_configs(self) -> dict[str, OpConfig]:
        return {op: self.choices[op][level] for op, level in self.level.items()}

    def _iterate_steps(self) -> Iterator[tuple[float, str, bool]]:
        """Yield the ratio and name of each step: of a tensor, or of the weight of an op."""
        for index in range(len(self.figures.tensors)):
            yield self._step_ratio(str(index), False), str(index), False
        for op in self.choices:
            if self.figures.weights.get(op):
                yield self._step_ratio(op, True), op, True

    def _step_ratio(self, name: str, is_weight: bool) -> float:
        """Return the negative noise removed per cost of a step; 0 for none."""
        raised = self._raised_levels(name, is_weight)
        if not raised:
            return 0.0
        gain, price = self._step_effect(raised)
        return -gain / max(price, 1e-30) if gain > 0 else 0.0

    def _raised_levels(self, name: str, is_weight: bool) -> dict[str, int]:
        """Return op → level after a step."""
        if is_weight:
            bits = _get_weight_bits(self.choices[name][self.level[name]])
            level = self._find_first_level(
                name, lambda c: bits is not None and _is_wider(_get_weight_bits(c), bits)
            )
            return {} if level is None else {name: level}
        tensor = self.figures.tensors[int(name)]
        narrowest = self._narrowest_bits(tensor.ops)
        if narrowest is None:
            return {}
        raised: dict[str, int] = {}
        for op in tensor.ops:
            current = self.choices[op][self.level[op]]
            if _get_activation_bits(current) == narrowest:
                level = self._find_first_level(op, partial(_widens_activations, current))
                if level is None:
                    return {}
                raised[op] = level
        return raised

    def _find_first_level(self, op: str, wider: Callable[[OpConfig], bool]) -> int | None:
        # Of an op with integers of one width, float is the next level.
        widths = {_get_activation_bits(config) for config in self.choices[op]} - {None}
        takes_float = self.takes_float or len(widths) < 2
        count = sum(takes_float or c.activation is not None for c in self.choices[op])
        levels = range(self.level[op] + 1, count)
        return next((level for level in levels if wider(self.choices[op][level])), None)

    def _step_effect(self, raised: Mapping[str, int]) -> tuple[float, float]:
        """Return the noise removed by a step, and the cost added."""
        near = {id(t): t for op in raised for t in self.touched[op]}.values()
        before = self._sum_noise_of(raised, near)
        price = -sum(self._op_cost(op, self.level[op]) for op in raised)
        previous = {op: self.level[op] for op in raised}
        self.level.update(raised)
        after = self._sum_noise_of(raised, near)
        price += sum(self._op_cost(op, self.level[op]) for op in raised)
        self.level.update(previous)
        return before - after, price

    def _sum_noise_of(self, ops: Iterable[str], tensors: Iterable[TensorNoise]) -> float:
        return sum(map(self._current_tensor_noise, tensors)) + sum(
            self._weight_noise_at(op, self.level[op]) for op in ops
        )

    def _current_tensor_noise(self, tensor: TensorNoise) -> float:
        narrowest = self._narrowest_bits(tensor.ops)
        return 0.0 if narrowest is None else tensor.noise_at_bits(narrowest)

    def _narrowest_bits(self, ops: Iterable[str]) -> int | None:
        """Return the fewest bits in which ops write or read a tensor; None if all are in float."""
        bits = (_get_activation_bits(self.choices[op][self.level[op]]) for op in ops)
        return min((b for b in bits if b is not None), default=None)

    def _weight_noise_at(self, op: str, level: int) -> float:
        return self.figures.weight_noise(op, _get_weight_bits(self.choices[op][level]))

    def _op_cost(self, op: str, level: int) -> float:
        return self.cost_of(op, self.choices[op][level])


def _get_activation_bits(config: OpConfig) -> int | None:
    return None if config.activation is None else config.activation.dtype.bits


def _get_weight_bits(config: OpConfig) -> int | None:
    return None if config.weight is None else config.weight.dtype.bits


def _widens_activations(before: OpConfig, after: OpConfig) -> bool:
    """Whether a config has more bits for activations than another, and no fewer for the weight."""
    bits, least = _get_activation_bits(before), _get_weight_bits(before) or 0
    return (
        bits is not None
        and _is_wider(_get_activation_bits(after), bits)
        and _is_wider(_get_weight_bits(after), least - 1)
    )


def _is_wider(own: int | None, bits: int) -> bool:
    """Whether the bits of a config are more than others; None for float, the widest."""
    return own is None or own > bits
