"""Models made of arithmetic, for strategies alone: which ops harm, and how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import Workload
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, QuantSpec
from neural_mp.core.trial import Outcome, Trial
from neural_mp.space import Capability, TuningSpace
from neural_mp.strategies import create_strategy_named
from neural_mp.strategies.base import Probe, TuningProblem

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


def branches(count: int = 3, configs=(*INT8, FP32)) -> TuningSpace:
    """op0 → op1, which `count` convolutions read side by side, each with a dense op behind it."""
    ops = [Op("op0", "conv", ("x",)), Op("op1", "conv", ("op0",))]
    for i in range(count):
        ops += [Op(f"branch{i}", "conv", ("op1",)), Op(f"end{i}", "dense", (f"branch{i}",))]
    return TuningSpace(OpGraph(ops, ["x"]), {op.name: Capability(configs) for op in ops})


@dataclass
class MadeUpProbe(Probe):
    """Noise that is added up over ops, by what each adds in INT8; keeps what it was asked.

    Attributes:
        noise: op → noise; None knows nothing.
        sensitivity: op → harm of rounding its weight.
        limit: questions it answers.
    """

    noise: Mapping[str, float] | None = None
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    limit: int = 10**9
    asked: list[PrecisionPlan] = field(default_factory=list)

    def output_noise(self, plan: PrecisionPlan, unit: str | None = None) -> float | None:
        self.asked.append(plan)
        if self.noise is None or len(self.asked) > self.limit:
            return None
        low = {op for op, config in plan.items() if config.precision is not Precision.FP32}
        return sum(noise for op, noise in self.noise.items() if op in low)

    def weight_sensitivity(self) -> Mapping[str, float]:
        return self.sensitivity


def run(
    space: TuningSpace,
    harm: Callable[[PrecisionPlan], float],
    noise: dict[str, float] | None = None,
    precisions=(Precision.INT8,),
    tolerance: float = 0.01,
    strategy: str = "basic",
    probe: Probe | None = None,
    seed: int = 0,
    objectives: Mapping[str, float] | None = None,
    figures: Callable[[PrecisionPlan], dict[str, float]] = lambda plan: {},
    repaired: Mapping[str, Mapping[str, float]] | None = None,
    workload: Workload | None = None,
) -> list[Trial]:
    """Drive the strategy with a made-up accuracy; all trials in order.

    Those that met the target have the `figures`; those no faster than FP32 by them are slow.
    """
    problem = TuningProblem(
        space,
        Observations(nsr=noise or {}, corrected_nsr=repaired or {}),
        precisions,
        seed,
        objectives or {"performance": 1.0},
        probe or Probe(),
        tolerance,
        workload,
    )
    search = create_strategy_named(strategy).search(problem)
    trials: list[Trial] = []
    answer = None
    while True:
        try:
            plans = search.send(answer) if answer is not None else next(search)
        except StopIteration:
            return trials
        answer = []
        for candidate in plans:
            plan = space.resolve(candidate).plan
            loss = harm(plan)
            outcome = Outcome.MET if loss <= tolerance else Outcome.MISSED
            measured = figures(plan) if outcome is Outcome.MET else {}
            if measured.get("relative_latency", 0.0) > 1:
                outcome = Outcome.SLOW
            answer.append(Trial(plan, outcome, 1 - loss, loss, measured, number=len(trials)))
            trials.append(answer[-1])


def int8_ops(plan: PrecisionPlan) -> set[str]:
    return {op for op, config in plan.items() if config.precision is Precision.INT8}


def hostile_tensor(plan: PrecisionPlan) -> float:
    """The tensor between op1 and op2 is bad when stored in INT8: whenever op2 reads it so."""
    return 0.9 if "op2" in int8_ops(plan) else 0.0


def high_ops(plan: PrecisionPlan) -> set[str]:
    return {op for op, config in plan.items() if config.precision is Precision.FP32}


def tried(
    space: TuningSpace,
    harm: Callable[[PrecisionPlan], float],
    noise: Mapping[str, float],
    **options: object,
) -> list[Trial]:
    """Return the trials of `mincut` for these NSRs; other tensors have little noise."""
    little = {f"op{i}": 1e-4 for i in range(12)}
    return run(space, harm, {**little, **noise}, strategy="mincut", **options)
