"""Models made of arithmetic, for strategies alone: which ops harm, and how much."""

from __future__ import annotations

from collections.abc import Callable

from neural_mp.graph import Op, OpGraph
from neural_mp.observations import Observations
from neural_mp.plan import PrecisionPlan
from neural_mp.precision import FP32, RANGE_ALGORITHMS, OpConfig, Precision, QuantSpec
from neural_mp.space import Capability, TuningSpace
from neural_mp.strategies import strategy_named
from neural_mp.strategies.base import TuningProblem
from neural_mp.trial import Outcome, Trial

WEIGHT = QuantSpec("int8", "symmetric", "per_channel")
INT8 = tuple(
    OpConfig(Precision.INT8, WEIGHT, QuantSpec("uint8", "asymmetric", "per_tensor", algorithm))
    for algorithm in RANGE_ALGORITHMS
)
BF16 = OpConfig(Precision.BF16)


def chain(length: int = 6, configs=(*INT8, FP32)) -> TuningSpace:
    """conv0 → … → dense; the last op is of another type."""
    ops = [Op("op0", "conv", ("x",))]
    ops += [
        Op(f"op{i}", "conv" if i < length - 1 else "dense", (f"op{i - 1}",))
        for i in range(1, length)
    ]
    graph = OpGraph(ops, ["x"])
    return TuningSpace(graph, {op.name: Capability(configs) for op in graph})


def run(
    space: TuningSpace,
    harm: Callable[[PrecisionPlan], float],
    noise: dict[str, float] | None = None,
    precisions=(Precision.INT8,),
    tolerance: float = 0.01,
    strategy: str = "basic",
) -> list[Trial]:
    """Drive the strategy with a made-up accuracy; all trials in order."""
    problem = TuningProblem(space, Observations(noise=noise or {}), precisions)
    search = strategy_named(strategy).search(problem)
    trials: list[Trial] = []
    answer = None
    while True:
        try:
            plans = search.send(answer) if answer is not None else next(search)
        except StopIteration:
            return trials
        answer = []
        for given in plans:
            plan = space.resolve(given)
            loss = harm(plan)
            outcome = Outcome.MET if loss <= tolerance else Outcome.MISSED
            answer.append(Trial(plan, outcome, 1 - loss, loss, number=len(trials)))
            trials.append(answer[-1])


def int8_ops(plan: PrecisionPlan) -> set[str]:
    return {op for op, config in plan.items() if config.precision is Precision.INT8}


def hostile_tensor(plan: PrecisionPlan) -> float:
    """The tensor between op1 and op2 is bad when stored in INT8: whenever op2 reads it so."""
    return 0.9 if "op2" in int8_ops(plan) else 0.0
